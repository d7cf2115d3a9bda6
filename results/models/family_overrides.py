"""What the families of transformers need that the names of their attributes do not tell.

Of a family: ``config``, values instead of the generic ones (dicts for parts); ``classes``, what to build; ``inputs``, inputs to add by name: a shape, or a
function of the maker of inputs (None leaves the input out); ``skip``, why it is not tried.
"""

from typing import Any

import torch

BATCH, PAST, FUTURE = 4, 17, 5
MIXED_HEADS = {"mamba_n_heads": 4, "mamba_d_head": 32}  # 2 x 64 channels
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}
SERIES = {
    "config": {"prediction_length": FUTURE, "context_length": 10, "lags_sequence": [1, 3, 7], "num_time_features": 1},
    "inputs": {
        "past_values": (BATCH, PAST),
        "past_time_features": (BATCH, PAST, 1),
        "past_observed_mask": lambda _: torch.ones(BATCH, PAST),
        "future_values": (BATCH, FUTURE),
        "future_time_features": (BATCH, FUTURE, 1),
    },
}
IMAGE_WORDS = {"<image>": 20} | {f"IMGIMG{'ABCD'[i]}Z": 30 + i for i in range(4)}
SHARED = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention", "full_attention"],
    "intermediate_size": 96,
    "vocab_size_per_layer_input": 96,
    "activation_sparsity_pattern": None,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
HALF_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
QUESTION = {"qformer_input_ids": lambda made: made.whole(48, 96, BATCH, 6)}
CODES = {"decoder_input_ids": lambda made: made.whole(0, 90, 2 * BATCH, 5)}  # a row for each of two codebooks
PYRAMID = {"decoder_in_channels": [64, 64, 64]}
POINTS = {"input_points": lambda made: made.whole(0, 60, BATCH, 1, 2, 2).float()}
# Segment-anything models: sizes in several parts must fit each other. The sizes of their images are 64, 4 x 4 or more patches remain.
PROMPTS = {"image_size": 64, "hidden_size": 32, "mask_input_channels": 8}
MASKS = {"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 2, "iou_head_hidden_dim": 32}
SAM = {
    "vision_config": {
        "image_size": 64,
        "patch_size": 8,
        "window_size": 4,
        "global_attn_indexes": [1],
        "output_channels": 32,
        "num_pos_feats": 16,
        "initializer_range": 0.02,  # 1e-10 by default: gradients of float32 would be rounding only
    },
    "prompt_encoder_config": PROMPTS | {"patch_size": 8},
    "mask_decoder_config": MASKS,
}
HIERA = {
    "image_size": [64, 64],
    "hidden_size": 16,
    "blocks_per_stage": [1, 1, 2, 1],
    "embed_dim_per_stage": [16, 32, 48, 64],
    "num_attention_heads_per_stage": [1, 2, 2, 4],
    "window_size_per_stage": [8, 4, 4, 2],
    "window_positional_embedding_background_size": [4, 4],
    "global_attention_blocks": [3],
}
HIERA_VISION = {
    "backbone_config": HIERA,
    "backbone_channel_list": [64, 48, 32, 16],
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    "fpn_hidden_size": 32,
}
SAM2 = {
    "vision_config": HIERA_VISION,
    "prompt_encoder_config": PROMPTS,
    "mask_decoder_config": MASKS,
}
SAM3_VISION = {
    "backbone_config": {"image_size": 64, "patch_size": 8, "window_size": 4},
    "backbone_feature_sizes": [[32, 32], [16, 16], [8, 8]],
}
SAM3 = {
    "vision_config": SAM3_VISION,
    "prompt_encoder_config": PROMPTS | {"patch_size": 8, "hidden_size": 64},
    "mask_decoder_config": MASKS | {"hidden_size": 64},
}


def _first_words(made: Any, count: int) -> torch.Tensor:
    """A mask of the words that are images."""
    mask = torch.zeros(BATCH, 7 + made.counts["image"], dtype=torch.bool)
    mask[:, 1 : 1 + count] = True
    return mask


OVERRIDES: dict[str, dict[str, Any]] = {
    "autoformer": SERIES,
    "informer": SERIES,
    "time_series_transformer": SERIES,
    "bamba": {"config": MIXED_HEADS | {"attn_layer_indices": [1]}},
    "falcon_h1": {"config": MIXED_HEADS | {"mamba_d_ssm": 128}},
    "granitemoehybrid": {"config": MIXED_HEADS},
    "mamba2": {"config": {"num_heads": 4, "head_dim": 32}},
    "blip-2": {"config": {"image_token_index": 20, "num_query_tokens": 2}},
    "blip_2_qformer": {"inputs": {"query_embeds": (BATCH, 8, 64)}},
    "blt": {"config": {"encoder_hash_byte_group_vocab": 96, "vocab_size": 260}},
    "chameleon": {"config": {"vocabulary_map": IMAGE_WORDS}},
    "clap": {"inputs": {"input_features": (BATCH, 1, 96, 64)}},
    "clap_audio_model": {"inputs": {"input_features": (BATCH, 1, 96, 64)}},
    "cvt": {"config": {"depth": [1, 2, 3]}},
    "dac": {
        "inputs": {"input_values": (BATCH, 1, 2000)},
        "config": {"decoder_hidden_size": 96, "encoder_hidden_size": 16},
    },
    "decision_transformer": {
        "inputs": {
            "states": (BATCH, 6, 17),
            "actions": (BATCH, 6, 4),
            "rewards": (BATCH, 6, 1),
            "returns_to_go": (BATCH, 6, 1),
            "timesteps": lambda made: made.whole(0, 50, BATCH, 6),
            "attention_mask": lambda _: torch.ones(BATCH, 6, dtype=torch.long),
        }
    },
    "deepseek_v2": {"config": EXPERTS},
    "dots1": {"config": EXPERTS},
    "dia": {"inputs": {"decoder_input_ids": lambda made: made.whole(0, 90, BATCH, 5, 9)}},
    "patchtsmixer": {"inputs": {"past_values": (BATCH, 32, 1)}},
    "patchtst": {"inputs": {"past_values": (BATCH, 32, 1)}},
    "timesfm": {
        "classes": ["TimesFmModel"],
        "inputs": {
            "past_values": (BATCH, 64),
            "past_values_padding": lambda _: torch.zeros(BATCH, 64, dtype=torch.long),
            "freq": lambda _: torch.zeros(BATCH, 1, dtype=torch.long),
        },
    },
    "efficientloftr": {"skip": "the loss of random weights does not depend on the images: all gradients are rounding"},
    "emu3": {"config": {"vocabulary_map": IMAGE_WORDS, "pad_token_id": 0}},
    "encodec": {"inputs": {"input_values": (BATCH, 1, 2000)}},
    "mimi": {"inputs": {"input_values": (BATCH, 1, 4000)}},
    "esm": {"config": {"vocab_size": 96, "pad_token_id": 1, "mask_token_id": 3}},
    "fun_asr_nano_encoder": {
        "inputs": {"input_features": (BATCH, 21, 560), "input_features_mask": lambda _: torch.ones(BATCH, 21).long()}
    },
    "gemma3n": {"config": {"text_config": SHARED}},
    "gemma3n_text": {"config": SHARED},
    "gemma3n_audio": {
        "inputs": {"audio_mel": (BATCH, 96, 128), "audio_mel_mask": lambda _: torch.zeros(BATCH, 96).bool()}
    },
    "glm4v": {"config": {"text_config": {"rope_parameters": ROPE}}},
    "glm46v": {"config": {"text_config": {"rope_parameters": ROPE}}},
    "glmga": {"config": {"text_config": {"rope_parameters": ROPE}}},
    "glm_ocr": {"config": {"text_config": {"rope_parameters": ROPE}}},
    "glm_image": {"config": {"text_config": {"rope_parameters": ROPE}}},
    "glm4v_text": {"config": {"rope_parameters": ROPE}},
    "glm_image_text": {"config": {"rope_parameters": ROPE}},
    "glm4v_moe": {"config": {"text_config": {"rope_parameters": HALF_ROPE}}},
    "glm4v_moe_text": {"config": {"rope_parameters": HALF_ROPE}},
    "gpt_neo": {"config": {"attention_types": [[["global", "local"], 1]], "num_layers": 2}},
    "instructblip": {"inputs": QUESTION, "config": {"image_token_index": 20, "num_query_tokens": 2}},
    "instructblipvideo": {"inputs": QUESTION, "config": {"video_token_index": 20, "num_query_tokens": 2}},
    "jamba": {"config": {"num_hidden_layers": 5}},
    "janus": {"config": {"vq_config": {"base_channels": 32, "channel_multiplier": [1, 1]}}},
    "kosmos-2": {"inputs": {"image_embeds_position_mask": lambda made: _first_words(made, 8)}},
    "laguna": {"config": {"num_hidden_layers": 2, "num_attention_heads_per_layer": [4, 4]}},
    "led": {"config": {"max_encoder_position_embeddings": 1100, "attention_window": 4}},
    "lfm2_moe": {
        "config": {"num_hidden_layers": 3, "num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv"]}
    },
    "lxmert": {
        "inputs": {"visual_feats": (BATCH, 5, 64), "visual_pos": (BATCH, 5, 4)},
        "config": {"visual_feat_dim": 64},
    },
    "moonshine": {"inputs": {"input_values": (BATCH, 4000), "attention_mask": None}},
    "musicgen": {
        "classes": ["MusicgenForConditionalGeneration"],
        "inputs": CODES,
        "config": {"decoder": {"num_codebooks": 2}},
    },
    "musicgen_melody": {
        "classes": ["MusicgenMelodyForConditionalGeneration"],
        "inputs": CODES,
        "config": {"decoder": {"num_codebooks": 2}},
    },
    "nemotron": {"config": {"num_key_value_heads": 2}},
    "oneformer": {"inputs": {"task_inputs": lambda made: made.whole(48, 96, BATCH, 6)}},
    "pix2struct": {
        "inputs": {
            "flattened_patches": lambda made: torch.cat(
                [made.whole(1, 5, BATCH, 6, 2).float(), made.noise(BATCH, 6, 192)], -1
            ),
            "attention_mask": lambda _: torch.ones(BATCH, 6),
        },
        "config": {"vision_config": {"patch_embed_hidden_size": 192}},
    },
    "pe_audio": {"inputs": {"input_values": (BATCH, 1, 4000)}},
    "pe_audio_encoder": {"inputs": {"input_values": (BATCH, 1, 4000)}},
    "d_fine": {"config": PYRAMID},
    "deimv2": {"config": PYRAMID},
    "pp_doclayout_v2": {"config": PYRAMID},
    "pp_doclayout_v3": {"config": PYRAMID},
    "pp_doclayout_v4": {"config": PYRAMID},
    "rt_detr": {"config": PYRAMID},
    "rt_detr_v2": {"config": PYRAMID},
    "qwen2_vl": {"config": {"text_config": {"rope_parameters": ROPE}}},
    "qwen2_vl_text": {"config": {"rope_parameters": ROPE}},
    "qwen2_5_vl": {"config": {"text_config": {"rope_parameters": ROPE}}},
    "qwen2_5_vl_text": {"config": {"rope_parameters": ROPE}},
    "qwen2_5_omni_thinker": {"config": {"text_config": {"rope_parameters": ROPE}}},
    "colqwen2": {"config": {"vlm_config": {"text_config": {"rope_parameters": ROPE}}}},
    "reformer": {
        "config": {
            "is_decoder": True,
            "axial_pos_embds": False,
            "attn_layers": ["local", "lsh"],
            "num_buckets": 2,
            "lsh_attn_chunk_length": 8,
            "local_attn_chunk_length": 8,
        }
    },
    # Smaller, to save time.
    "lw_detr_vit": {"config": {"image_size": 64, "pretrain_image_size": 64, "patch_size": 8, "num_windows": 4}},
    "mobilevitv2": {"config": {"image_size": 64}},
    "pixtral": {"config": {"image_size": 32}},
    "swin2sr": {"config": {"image_size": 16, "window_size": 4}},
    "vits": {"config": {"upsample_initial_channel": 64}},
    "sam": {"inputs": POINTS, "config": SAM},
    "sam_hq": {"inputs": POINTS, "config": SAM | {"mask_decoder_config": MASKS | {"vit_dim": 64}}},
    "sam2": {"config": SAM2},
    "sam2_hiera_det_model": {"config": HIERA},
    "sam2_video": {"config": SAM2 | {"image_size": 64}},
    "sam2_vision_model": {"config": HIERA_VISION},
    "sam3_tracker": {"config": SAM3},
    "sam3_video": {"config": {"tracker_config": SAM3 | {"image_size": 64}}},
    "edgetam_video": {"config": SAM2 | {"image_size": 64}},
    "textnet": {"config": {"image_size": [64, 64]}},
}
