"""A small configuration of every model family of Hugging Face transformers, made from the names of its attributes."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import transformers
from family_overrides import OVERRIDES
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto import configuration_auto, modeling_auto
from transformers_inputs import ways
from trial import Inputs, Skipped

MOST_PARAMETERS, MOST_CLASSES = 40_000_000, 8
SMALL_BACKBONE = "test_resnet"  # of timm
SMALL_IMAGE = 32
FIRST_WORD = 48  # special tokens have smaller ids
TASKS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "MASKED_LM",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "PRETRAINING",
    "",
)  # the rest follows
SIZES = (  # the first pattern that matches an attribute's name gives its largest value
    (r"n_groups?|topk_group|num_expert_groups?|(num_|n_)?shared_experts?|n_shared_experts", 1),
    (r".*(type_vocab|group|groups|expand|ratio|factor|stride|kernel|labels|spatial_merge).*", None),
    (r".*codebook_size|n_codes|codebook_dim", 64),
    (r".*vocab(ulary)?_size.*|num_embeddings|num_tokens", 96),
    (r".*(max|num|n)_.*position.*|n_positions|n_ctx|seq_len(gth)?|max_seq_len|max_(source|target|text|speech)_.*", 128),
    (r"(.*_)?(num_)?(key_value|kv)_heads|(.*_)?n(um)?_?kv_?heads?|num_key_value_attention_heads|num_query_groups", 2),
    (r".*(heads?|num_heads.*|n_head|attention_heads)", 4),
    (r"rotary_dim", 8),
    (r".*head_dim|.*head_size|d_kv|.*d_head|head_width", 16),
    (r".*(lora_rank|rank|lora_dim)", 16),
    (r"(num_|n_).*(per_tok|top_?k|topk).*|moe_(top_?)?k|top_?k|router_top_k|num_selected_experts", 2),
    (r".*(experts|num_experts.*)", 4),
    (r".*(layers?|n_layer|num_blocks|depth)(_per_.*)?", 2),
    (r".*(intermediate|ffn|ffw|d_ff|mlp_dim|d_inner|n_inner|feed_forward|ff_dim|ff_size).*", 96),
    (r"(num|n)_(queries|query_tokens|latents|detection_tokens|object_queries)|num_denoising", 8),
    (r".*(num_frames|n_frames|frames_per_clip)", 2),
    (r"patch_size", 8),
    (r".*(hidden_size|d_model|n_embd|embed_dim|embedding_size|embedding_dim|width|hidden|emb_dim|dim|d_latents)", 64),
)
Attempt = tuple[str, Callable[[], tuple[nn.Module, Sequence[Inputs]]]]


def families() -> list[str]:
    """The model types that an auto class can build."""
    return [family for family in configuration_auto.CONFIG_MAPPING_NAMES if classes(family)]


def classes(family: str) -> list[str]:
    """The family's classes, those with the most usual tasks first."""
    tables = {name: table for name, table in vars(modeling_auto).items() if name.endswith("MAPPING_NAMES")}
    order = [f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES" for task in TASKS]
    found: list[str] = []
    for name in [*order, *(name for name in tables if name not in (*order, "CONFIG_MAPPING_NAMES"))]:
        entry = tables[name].get(family, ())
        found += [entry] if isinstance(entry, str) else entry
    return list(dict.fromkeys(found))


def attempts(family: str) -> Iterator[list[Attempt]]:
    """Ways to build a model: small in every way, and then only with few layers; with each of the family's classes."""
    override = OVERRIDES.get(family, {})
    if "skip" in override:
        raise Skipped(override["skip"])
    names = override.get("classes", classes(family)[:MOST_CLASSES])
    for size in ("small", "shallow"):
        yield [(f"{size} {name}", lambda size=size, name=name: _model(family, name, size, override)) for name in names]


def _model(family: str, class_name: str, size: str, override: dict[str, Any]) -> tuple[nn.Module, Sequence[Inputs]]:
    config = configuration(family, size, override)
    kind = getattr(transformers, class_name)
    try:
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in kind(config).parameters())
    except Exception:
        count = 0  # some compute with their weights when they are built
    if count > MOST_PARAMETERS:
        raise Skipped(f"{count:,} parameters")
    config = configuration(family, size, override)
    model = kind(config).float()
    return model, ways(model, override.get("inputs", {}))


def configuration(family: str, size: str, override: dict[str, Any]) -> PreTrainedConfig:
    if "make" in override:
        return override["make"]()
    return smaller(transformers.CONFIG_MAPPING[family](), size, override.get("config", {}))


def smaller(config: PreTrainedConfig, size: str, own: dict[str, Any], first_special: int = 20) -> PreTrainedConfig:
    """A configuration of the same class with smaller values; ``own`` has values to use instead, in dicts for parts."""
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    known = {*inspect.signature(type(config).__init__).parameters, *(field.name for field in fields)}
    # what is None until it is made from other values is made again
    known -= {
        f.name
        for f in fields
        if f.default is None and type(vars(config).get(f.name)) is int and not _is_special(f.name)
    }
    try:
        usual = vars(type(config)())
    except Exception:
        usual = {}
    specials = iter(range(first_special, FIRST_WORD))
    values: dict[str, Any] = {}
    if size == "small" and "head_dim" in known and vars(config).get("head_dim", 0) is None:
        values["head_dim"] = 16
    for name, value in vars(config).items():
        if name in known and name not in own:
            is_part = isinstance(value, PreTrainedConfig)
            new = smaller(value, size, {}, first_special=10) if is_part else _smaller_value(name, value, size, specials)
            if is_part or name not in usual or new != usual[name]:
                values[name] = new
    for name, value in own.items():
        part = getattr(config, name, None)
        is_part = isinstance(value, dict) and isinstance(part, PreTrainedConfig)
        values[name] = smaller(part, size, value, first_special=10) if is_part else value
    if (
        size == "small"
        and isinstance(vars(config).get("patch_size"), int)
        and "depths" not in vars(config)
        and "image_size" not in own
    ):
        values |= {"image_size": SMALL_IMAGE} if isinstance(vars(config).get("image_size"), int) else {}
    if "depths" in vars(config) and getattr(config, "stage_names", None):
        values.setdefault("out_features", config.out_features)
    _keep_together(vars(config), values, own)
    return type(config)(**values)


def _keep_together(before: dict[str, Any], values: dict[str, Any], own: dict[str, Any]) -> None:
    """Correct values that depend on each other."""
    if before.get("num_key_value_heads") == before.get("num_attention_heads") and "num_key_value_heads" not in own:
        values["num_key_value_heads"] = values.get("num_attention_heads", before.get("num_attention_heads"))
    values.pop("num_key_value_heads", None) if values.get("num_key_value_heads") is None else None
    kinds = before.get("layer_types") or before.get("layers_block_type") or before.get("mlp_layer_types")
    layers = next((name for name in ("num_hidden_layers", "n_layer", "num_layers") if name in values), None)
    if layers is not None and layers not in own:
        if isinstance(kinds, list) and len(set(kinds)) > 1:
            values[layers] = max(2, min(8, max(kinds.index(kind) for kind in set(kinds)) + 1))
        chosen = before.get("_out_indices") or before.get("out_indices") or ()
        if len(chosen) > 1 and "depths" not in before:
            values |= {
                layers: max(4, len(chosen)),
                "out_indices": list(range(1, len(chosen) + 1)),
                "out_features": None,
            }
        for name, value in before.items():
            if (
                name.endswith(("layer_types", "block_type", "block_types"))
                and isinstance(value, list)
                and name not in own
            ):
                values[name] = value[: values[layers]]
    for name in ("rope_parameters", "rope_scaling"):
        rope = before.get(name)
        if isinstance(rope, dict) and "mrope_section" in rope and name not in own:
            width = values.get("head_dim", before.get("head_dim") or 16)
            half = int(width * rope.get("partial_rotary_factor", before.get("partial_rotary_factor") or 1.0)) // 2
            values[name] = rope | {"mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}


def _smaller_value(name: str, value: Any, size: str, specials: Iterator[int]) -> Any:
    if isinstance(value, bool) or value is None:
        return False if name == "apply_spec_augment" else value
    if isinstance(value, float):
        return (
            0.0
            if "drop" in name or "jitter" in name or (name.startswith("mask_") and name.endswith("_prob"))
            else value
        )
    if _is_special(name):
        if isinstance(value, int):
            return next(specials) if value >= FIRST_WORD else value
        return [next(specials) if v >= FIRST_WORD else v for v in value] if isinstance(value, list) else value
    if isinstance(value, list | tuple) and value and all(type(v) is int for v in value):
        return type(value)(_smaller_entry(name, v, size) for v in value)
    if name == "backbone" and isinstance(value, str):
        return SMALL_BACKBONE
    if type(value) is not int:
        return value
    if size == "small" and re.fullmatch(r"(.*_)?image_size|img_size|input_size|image_resolution", name):
        return min(value, 64)
    for pattern, largest in SIZES:
        if re.fullmatch(pattern, name):
            shrinks = largest is not None and (size == "small" or largest in (1, 2, 96) or "expert" in name)
            return min(value, largest) if shrinks else value
    return value


def _is_special(name: str) -> bool:
    """Whether it is the id of a special token."""
    return re.fullmatch(r".*_token(_id|_index|_ids)?|.*_id|.*_token_idx", name) is not None


def _smaller_entry(name: str, value: int, size: str) -> int:
    """A number of a list: a depth becomes 1, a width an eighth."""
    if re.fullmatch(r"depths?|.*(num_blocks|layers|blocks_per_stage|layer_depths).*", name):
        return min(value, 1)
    if size == "shallow":
        return value
    if re.fullmatch(r".*image_size|img_size|input_size", name):
        return min(value, 64)
    if re.fullmatch(r".*heads.*", name):
        return min(value, 2)
    is_width = re.fullmatch(r".*(hidden_sizes?|channels?|dims?|embed_dim.*|filters|widths|sizes)", name) and value >= 16
    return max(8, min(64, value // 64 * 8)) if is_width and "kernel" not in name and "patch" not in name else value
