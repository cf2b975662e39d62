"""Makes a small config of any model type from transformers' defaults for it, so that a random model runs in seconds.

All sizes are set by the names that configs use for them, at every level: a few layers, 64 channels, 4 heads, 4 experts.
What makes a type special (biases, windows, soft-caps, scales, kinds of layers) keeps its default. OVERRIDES holds what
the rules cannot know.
"""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

LAYERS, HIDDEN, HEADS, HEAD_DIM, VOCAB, CONTEXT, WINDOW = 4, 64, 4, 16, 256, 512, 16
_LAYER_NAMES = """num_hidden_layers n_layer n_layers num_layers num_decoder_layers encoder_layers decoder_layers depth
        layers num_attention_layers""".split()
_SIZES = [
    (HIDDEN, """hidden_size n_embd d_model dim embed_dim hidden_dim out_hidden_size text_hidden_size mm_hidden_size
        output_hidden_size projection_dim input_dim output_dim proj_hidden_size projector_hidden_size embedding_size
        word_embed_proj_dim cross_attention_hidden_size encoder_hidden_size depth_output_dim rotary_embedding_base_dim
        audio_hidden_size vision_hidden_size hidden_size_per_layer_input projection_size out_dim"""),
    (96, """intermediate_size ffn_dim d_ff n_inner ffn_hidden_size moe_intermediate_size moe_ffn_hidden_size
        shared_expert_intermediate_size shared_intermediate_size encoder_ffn_dim decoder_ffn_dim mlp_hidden_size
        dense_intermediate_size intermediate_size_mlp expert_ffn_hidden_size moe_shared_expert_intermediate_size
        shared_transformer_intermediate_size prefix_dense_intermediate_size latent_dim"""),
    (HEADS, """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        attention_heads num_attention_head"""),
    (2, """num_key_value_heads num_kv_heads n_kv_heads n_head_kv num_experts_per_tok num_experts_per_token moe_top_k
        top_k moe_topk moe_k num_selected_experts experts_per_token swa_num_key_value_heads num_global_key_value_heads
        top_k_experts"""),
    (4, """num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts n_experts"""),
    (HEAD_DIM, """head_dim v_head_dim kv_lora_rank d_kv attention_head_dim global_head_dim swa_head_dim kv_channels
        swa_v_head_dim head_size vocab_size_per_layer_dim"""),
    (8, "qk_rope_head_dim rotary_dim"),
    (24, "qk_head_dim"),
    (16, "qk_nope_head_dim mamba_d_state state_size"),
    (32, "q_lora_rank image_size lora_rank index_head_dim"),
    (VOCAB, "vocab_size text_vocab_size vocab_size_per_layer_input padded_vocab_size audio_vocab_size"),
    (CONTEXT, "max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length seq_length max_seq_length"),
    (WINDOW, "sliding_window window_size attention_window_size local_attention window"),
    (1, """n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts
        first_k_dense_replace num_nextn_predict_layers moe_layer_start_index"""),
]  # fmt: skip
SIZES = {name: size for size, names in [*_SIZES, (LAYERS, " ".join(_LAYER_NAMES))] for name in names.split()}
# What the rules get wrong, by type: values of the config, or of the config in it that is named before the dot.
_MROPE = {"text_config.rope_parameters.mrope_section": [2, 3, 3]}
_MROPE_OF_HALF = {"text_config.rope_parameters.mrope_section": [1, 1, 2]}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_ROPE_BY_LAYER_TYPE = {"full_attention": _ROPE, "sliding_attention": _ROPE}
_ADAPTERS = {
    "vision_config.adapter_in_dim": HIDDEN, "vision_config.adapter_out_dim": HIDDEN,
    "audio_config.adapter_input_size": HIDDEN, "audio_config.adapter_out_dim": HIDDEN,
}  # fmt: skip
_CONVOLUTIONS = ["conv", "full_attention", "conv", "full_attention"]
_SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2  # the layers that share keys have both types too
_SPARSE = ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"]
_IMAGE_TOKENS = {"vocabulary_map": {"<image>": 200, "IMGIMGA": 201}}
_MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": HEAD_DIM}
_HEAD_DIM = {"head_dim": HEAD_DIM}
OVERRIDES: dict[str, dict[str, Any]] = {
    "qwen2_vl": _MROPE, "qwen2_5_vl": _MROPE, "paddleocr_vl": _MROPE,
    "glm4v": _MROPE, "glm46v": _MROPE, "glm_ocr": _MROPE, "glmga": _MROPE, "glm4v_moe": _MROPE_OF_HALF,
    "hunyuan_v1_dense": _HEAD_DIM, "hunyuan_v1_moe": _HEAD_DIM, "ministral": _HEAD_DIM,
    "hunyuan_vl": {"text_config.head_dim": HEAD_DIM, "text_config.rope_parameters.mrope_section": [2, 2, 2, 2]},
    "nemotron": {"num_key_value_heads": 2, "head_dim": HEAD_DIM},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "granite4_vision": {"deepstack_layer_map": [], "spatial_target_layers": [0, 1, 2, 3], "downsample_rate": "4/8"},
    "ernie4_5_vl_moe": {"text_config.rope_parameters.mrope_section": [3, 3, 2]},
    "chameleon": _IMAGE_TOKENS, "emu3": _IMAGE_TOKENS,
    "mistral4": {"head_dim": HEAD_DIM},
    "dots3_note_text": {"head_dim": 24}, "dots3_note": {"text_config.head_dim": 24, **_ADAPTERS},
    "dbrx": {"attn_config.rope_theta": 10000.0, "attn_config.clip_qkv": 8.0},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {**_MAMBA_HEADS, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**_MAMBA_HEADS, "layer_types": ["linear_attention", "full_attention"] * 2},
    "kimi_linear": {"linear_num_heads": HEADS, "linear_head_dim": HEAD_DIM},
    "mamba2": {"num_heads": 8, "head_dim": HEAD_DIM},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HEAD_DIM,
    },
    "zamba2": {
        "n_mamba_heads": 8, "mamba_headdim": HEAD_DIM, "mamba_ngroups": 1, "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 2 * HEAD_DIM, "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
    },
    "nemo_speechlm": {
        "text_config.layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "text_config.time_step_min": 1e-9,  # the decode steps of `generate` do not apply it
    },
    "lfm2": {"layer_types": _CONVOLUTIONS}, "lfm2_moe": {"layer_types": _CONVOLUTIONS},
    "lfm2_vl": {"text_config.layer_types": _CONVOLUTIONS},
    "step3p7": {"text_config.sliding_window": WINDOW}, "step3p5": {"sliding_window": WINDOW},
    "gemma3n_text": {"layer_types": _SLIDING_AND_FULL, "num_kv_shared_layers": 2},
    "gemma3n": {"text_config.layer_types": _SLIDING_AND_FULL, "text_config.num_kv_shared_layers": 2},
    "gemma4_assistant": {"text_config.num_kv_shared_layers": LAYERS},
    "diffusion_gemma": {"text_config.num_experts": 4, "text_config.top_k_experts": 2,
                        "text_config.moe_intermediate_size": 96},
    # as in their published checkpoints
    "bitnet": {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear"}},
    "minimax_m3_vl": {"text_config.layer_types": _SPARSE}, "minimax_m3_vl_text": {"layer_types": _SPARSE},
    "kyutai_speech_to_text": {"codec_config.upsample_groups": HIDDEN},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32]}, "xmod": {"is_decoder": True},
    "molmo2": {"adapter_config.vision_feature_layer": [2, 3]},
    "qwen2_5_omni_thinker": {**_MROPE, "vision_start_token_id": 200},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 200},
    "fun_asr_nano": {"adaptor_config.intermediate_size": 16},
    "xlnet": {"d_head": 16},
    "cohere_compass": {"text_config.rope_parameters": _ROPE_BY_LAYER_TYPE},
    "cohere_compass_text": {"rope_parameters": _ROPE_BY_LAYER_TYPE},
}  # fmt: skip


# Arguments of config classes whose defaults are invalid.
ARGUMENTS = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
}  # fmt: skip
ENCODER_DECODERS = ("t5gemma2",)  # without a decoder that works alone


def small_config(model_type: str) -> PreTrainedConfig:
    """Raises what the config's class raises."""
    config_class = CONFIG_MAPPING[model_type]
    values = config_class(**ARGUMENTS.get(model_type, {})).to_dict()
    for name, sub_config in (getattr(config_class, "sub_configs", None) or {}).items():
        if values.get(name) is None and hasattr(sub_config, "model_type") and sub_config.model_type:
            values[name] = sub_config().to_dict()
    values = shrink(values)
    if model_type in ENCODER_DECODERS:
        values["is_encoder_decoder"] = True
    for path, value in OVERRIDES.get(model_type, {}).items():
        *parents, name = path.split(".")
        target = values
        for parent in parents:
            target = target[parent]
        target[name] = value
    for name in ("architectures", "dtype", "torch_dtype", "_name_or_path", "transformers_version"):
        values.pop(name, None)
    return config_class.from_dict(values)


def shrink(values: dict[str, Any]) -> dict[str, Any]:
    """`values` with small sizes, in the dicts within it too."""
    result: dict[str, Any] = {}
    old_layers = next((values[name] for name in _LAYER_NAMES if isinstance(values.get(name), int)), None)
    for name, value in values.items():
        if isinstance(value, dict) and name not in ("id2label", "label2id"):
            result[name] = shrink(value)
        elif isinstance(value, bool) or value is None:
            result[name] = value
        elif isinstance(value, int) and name in SIZES:
            result[name] = min(value, SIZES[name]) if value > 0 else value
        elif isinstance(value, list) and old_layers and len(value) == old_layers and old_layers > LAYERS:
            result[name] = [value[layer] for layer in representative(value)]
        else:
            result[name] = value
    if isinstance(by_layer := values.get("per_layer_config"), dict):  # of layers by number
        layers = representative(values.get("layer_types") or [])
        by_number = {int(number): shrink(config) for number, config in by_layer.items()}
        result["per_layer_config"] = {new: by_number[old] for new, old in enumerate(layers) if old in by_number}
    if "qk_rope_head_dim" in values and "head_dim" in values:
        result["head_dim"] = result["qk_rope_head_dim"]  # that of rotary factors
    for name in ("num_key_value_heads", "num_kv_heads"):
        if values.get(name) is not None and values[name] == values.get("num_attention_heads"):
            result[name] = HEADS  # without grouping
    if result.get("is_encoder_decoder"):
        result |= {"is_encoder_decoder": False, "is_decoder": True}  # the decoder as a causal LM
    _fix_tokens(result)
    _fix_rope(result)
    return result


def representative(per_layer: list[Any]) -> list[int]:
    """LAYERS indices into a list with a value per layer, with as many different values as fit, in order."""
    chosen: list[int] = []
    seen: list[Any] = []
    for index, value in enumerate(per_layer):
        if value not in seen and len(chosen) < LAYERS:
            seen.append(value)
            chosen.append(index)
    rest = [index for index in range(len(per_layer)) if index not in chosen]
    return sorted(chosen + rest[: LAYERS - len(chosen)])


def _fix_tokens(values: dict[str, Any]) -> None:
    """Distinct special tokens within the vocabulary."""
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if name in values:
            values[name] = ("pad_token_id", "bos_token_id", "eos_token_id").index(name)
    others = sorted(
        name for name, value in values.items() if str(name).endswith(("_token_id", "_token_index")) and value
    )
    for number, name in enumerate(others):
        if isinstance(values[name], int) and values[name] >= 3:
            values[name] = VOCAB - 1 - number


def _fix_rope(values: dict[str, Any]) -> None:
    if "mrope_section" in values:
        values["mrope_section"] = [2, 3, 3]
