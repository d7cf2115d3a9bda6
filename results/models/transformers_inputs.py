"""Random inputs for a model of transformers, from the names of its arguments."""

import inspect
import re
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from trial import BATCH, Batch

WORDS, TARGET_WORDS, FRAMES = 7, 5, 2
FIRST_WORD = 48
MOST_PLACEHOLDERS, WIDTH = 256, 64
PADDED = 2  # last words of the second example that are padding
PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index", "media_token_id", "boi_token_id", "im_patch_id"),
    "audio": ("audio_token_id", "audio_token_index"),
}


def ways(model: nn.Module, own: dict[str, Any]) -> list["Made"]:
    """Ways to make inputs: with all that the model takes first, text alone last."""
    takes = set(inspect.signature(model.forward).parameters)
    pixels = (
        ["image", "image, size", "patches", "images", "images, size", "video"]
        if takes & {"pixel_values", "hidden_states"}
        else [""]
    )
    if "pixel_values_videos" in takes and "pixel_values" not in takes:
        pixels = ["video"]
    sounds = ["mel first", "mel last", "wave"] if takes & {"input_features", "input_values"} else [""]
    if "image_sizes" not in takes:
        pixels = [kind for kind in pixels if "size" not in kind]
    is_optional = "input_ids" in takes
    found = [(p, s, m) for m in ("padded", "full") for p, s in product(pixels, sounds)]
    if is_optional:
        for m in ("padded", "full"):
            found += [(p, "", m) for p in pixels] + [("", s, m) for s in sounds] + [("", "", m)]
    return [Made(model, takes, *kind, own) for kind in dict.fromkeys(found)]


class Made:
    """Makes inputs of one kind."""

    def __init__(
        self, model: nn.Module, takes: set[str], pixels: str, sounds: str, mask: str, own: dict[str, Any]
    ) -> None:
        self.config, self.takes, self.own = model.config, takes, own
        self.pixels, self.sounds, self.mask = pixels, sounds, mask
        self.counts = {"image": 2 if pixels else 0, "audio": 2 if sounds else 0}

    def __str__(self) -> str:
        return ", ".join(
            filter(None, ["text" if "input_ids" in self.takes else "", self.pixels, self.sounds, self.mask])
        )

    def learn(self, error: str) -> bool:
        found = re.search(
            r"(image|audio|multimodal)?.*tokens: (\d+),? features:? ?(\d+)", error, re.IGNORECASE | re.DOTALL
        )
        if found is None:
            return False
        kind = "audio" if (found[1] or "").lower() == "audio" or not self.pixels else "image"
        count, rest = divmod(int(found[3]), BATCH)
        while count > MOST_PLACEHOLDERS and count % WIDTH == 0:
            count //= WIDTH  # numbers were counted, not vectors
        if rest or count == self.counts[kind] or count > MOST_PLACEHOLDERS:
            return False
        self.counts[kind] = count
        return True

    def __call__(self, seed: int) -> Batch:
        self.generator = torch.Generator().manual_seed(seed)
        batch: Batch = {}
        if "input_ids" in self.takes:
            batch |= self._text()
        if "decoder_input_ids" in self.takes:
            batch["decoder_input_ids"] = self._words(TARGET_WORDS, decoder=True)
        if self.pixels:
            batch |= self._images()
        if self.sounds:
            batch |= self._sounds()
        for name, make in self.own.items():
            if make is None:
                batch.pop(name, None)
            elif name in self.takes:
                batch[name] = make(self) if callable(make) else self.noise(*make)
        return batch

    # ---------------------------------------------------------------- kinds of inputs

    def _text(self) -> Batch:
        special = []
        for kind, names in PLACEHOLDERS.items():
            ids = [value for name in names if (value := find(self.config, name)) is not None]
            special += ids[:1] * self.counts[kind] if ids else []
        words = self._words(WORDS)
        end = find(self.config, "eos_token_id")
        end = end[0] if isinstance(end, list) else end
        if isinstance(end, int) and 0 <= end < FIRST_WORD:
            words[:, -1] = end
        front = torch.tensor(special, dtype=torch.long).expand(BATCH, -1)
        ids = torch.cat([words[:, :1], front, words[:, 1:]], 1)
        batch: Batch = {"input_ids": ids}
        is_placeholder = torch.zeros_like(ids)
        is_placeholder[:, 1 : 1 + len(special)] = 1
        if special:
            batch |= {name: is_placeholder for name in ("token_type_ids", "mm_token_type_ids") if name in self.takes}
        if "attention_mask" in self.takes:
            mask = torch.ones_like(ids)
            if self.mask == "padded":
                mask[1, -PADDED:] = 0
            batch["attention_mask"] = mask
        if "bbox" in self.takes:
            corner = self.whole(0, 40, *ids.shape, 2)
            batch["bbox"] = torch.cat([corner, corner + self.whole(1, 40, *ids.shape, 2)], -1)
        return batch

    def _images(self) -> Batch:
        vision = next(
            (
                part
                for name in ("vision_config", "backbone_config", "encoder", "detector_config")
                if (part := getattr(self.config, name, None))
            ),
            self.config,
        )
        size = find(vision, "image_size") or find(self.config, "image_size") or 64
        height, width = size if isinstance(size, list | tuple) else (size, size)
        channels = find(vision, "num_channels") or find(vision, "in_channels") or 3
        channels = channels if isinstance(channels, int) else 3
        name = (
            "pixel_values"
            if "pixel_values" in self.takes
            else "pixel_values_videos"
            if "pixel_values_videos" in self.takes
            else "hidden_states"
        )
        grid = "image_grid_thw" if "image_grid_thw" in self.takes else "grid_thw" if "grid_thw" in self.takes else ""
        if self.pixels == "patches":
            patch, times = find(vision, "patch_size") or 8, find(vision, "temporal_patch_size") or 1
            rows = 2 * (find(vision, "spatial_merge_size") or 1)
            tall = rows + (find(vision, "spatial_merge_size") or 1)
            batch = {name: self.noise(BATCH * rows * tall, channels * times * patch * patch)}
            return batch | ({grid: torch.tensor([[1, rows, tall]] * BATCH)} if grid else {})
        kind, _, is_sized = self.pixels.partition(", ")
        extra = {"image": (), "images": (1,), "video": (find(vision, "num_frames") or FRAMES,)}[kind]
        batch = {name: self.noise(BATCH, *extra, channels, height, width)}
        if is_sized:
            batch["image_sizes"] = torch.tensor([[height, width]] * BATCH)
        return batch

    def _sounds(self) -> Batch:
        audio = next(
            (
                part
                for name in ("audio_config", "encoder_config", "encoder")
                if (part := getattr(self.config, name, None))
            ),
            self.config,
        )
        bins = next(
            (
                value
                for name in (
                    "num_mel_bins",
                    "feature_size",
                    "input_feat_per_channel",
                    "mel_bins",
                    "input_size",
                    "num_mel_filters",
                    "feature_projection_input_dim",
                    "input_dim",
                    "input_feat_size",
                )
                if isinstance(value := find(audio, name), int)
            ),
            80,
        )
        longest = find(audio, "max_source_positions")
        frames = find(audio, "max_length") or (2 * longest if isinstance(longest, int) and longest <= 256 else 96)
        name = "input_features" if "input_features" in self.takes else "input_values"
        shape = {"mel first": (bins, frames), "mel last": (frames, bins), "wave": (2000,)}[self.sounds]
        batch: Batch = {name: self.noise(BATCH, *shape)}
        masks = [
            n
            for n in ("input_features_mask", "feature_attention_mask", "audio_mel_mask", "audio_attention_mask")
            if n in self.takes
        ]
        return batch | {n: torch.ones(BATCH, frames, dtype=torch.long) for n in masks}

    # ---------------------------------------------------------------- random numbers

    def _words(self, count: int, decoder: bool = False) -> Tensor:
        part = getattr(self.config, "decoder", None) if decoder else None
        vocabulary = find(part, "vocab_size") if part is not None else None
        vocabulary = (
            vocabulary
            or find(self.config, "vocab_size")
            or find(getattr(self.config, "text_config", None), "vocab_size")
            or 96
        )
        return self.whole(min(FIRST_WORD, vocabulary // 2), vocabulary, BATCH, count)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)


def find(config: Any, name: str) -> Any:
    """An attribute of a configuration, or of its text part."""
    value = getattr(config, name, None)
    if value is None and config is not None:
        for part in ("text_config", "thinker_config", "vlm_config"):
            value = value if value is not None else getattr(getattr(config, part, None), name, None)
    return value
