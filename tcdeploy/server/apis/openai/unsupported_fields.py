"""Request fields of other servers that would change the answer here, and are not supported. Does not import torch.

Unknown fields are accepted, because clients send many that change nothing. These fields of OpenAI, vLLM, SGLang, TGI
and llama.cpp's server would change the answer, so they are refused by name. Clients with sliders send all fields with
the values that turn them off, so these values are accepted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tcdeploy.server.apis.openai.protocol import ApiError, SamplingRequest, bad_request

# Field -> values that change nothing. Null is accepted for every field.
INERT_VALUES: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "suffix": ("",), "best_of": (1,), "tools": ([],), "tool_choice": ("none",), "functions": ([],), "echo": (False,),
    "function_call": ("none",), "audio": (), "modalities": (["text"],), "prediction": (), "web_search_options": (),
    "store": (False,), "verbosity": ("medium",), "reasoning": ({},),
    # vLLM
    "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,),
    "allowed_token_ids": (), "logits_processors": ([],), "include_stop_str_in_output": (False,),
    "spaces_between_special_tokens": (True,), "truncation_side": ("left",),
    "logprob_token_ids": (), "prompt_embeds": (), "chat_template": ("",),
    "continue_final_message": (False,), "documents": ([],),
    "guided_whitespace_pattern": (), "guided_json_object": (False,), "guided_decoding_backend": ("auto", "guidance"),
    "structural_tag": (), "repetition_detection": (), "thinking_token_budget": (), "include_reasoning": (True,),
    "return_tokens_as_token_ids": (False,), "return_prompt_text": (False,), "watermarking": (False,),
    "vllm_xargs": ({},), "extra_body": ({},),
    # SGLang
    "regex": ("",), "ebnf": ("",), "stop_regex": ([], ""), "no_stop_trim": (False,), "lora_path": (), "input_ids": (),
    "input_embeds": (), "custom_logit_processor": (), "custom_params": ({},), "session_params": ({},), "task": (),
    "separate_reasoning": (True,), "return_hidden_states": (False,), "return_routed_experts": (False,),
    "return_meta_info": (False,), "return_prompt_token_ids": (False,), "min_new_tokens": (0,), "sampling_seed": (),
    # TGI
    "do_sample": (True,), "max_new_tokens": (), "truncate": (), "typical_p": (1,), "watermark": (False,),
    "return_full_text": (False,), "decoder_input_details": (False,), "top_n_tokens": (0,), "adapter_id": (),
    "guideline": (), "tool_prompt": (),
    # llama.cpp
    "grammar": ("",), "grammar_lazy": (False,), "grammar_triggers": ([],), "json_schema": (), "n_predict": (-1,),
    "n_indent": (0,), "n_cmpl": (), "t_max_predict_ms": (0, -1), "dynatemp_range": (0,), "dynatemp_exponent": (1,),
    "top_n_sigma": (-1, 0), "xtc_probability": (0,), "xtc_threshold": (0.1,), "repeat_penalty": (1,),
    "repeat_last_n": (-1, 64), "dry_multiplier": (0,), "dry_base": (1.75,), "dry_allowed_length": (2,),
    "dry_penalty_last_n": (-1,), "dry_sequence_breakers": (["\n", ":", '"', "*"],), "mirostat": (0,),
    "mirostat_mode": (0,), "mirostat_tau": (5,), "mirostat_eta": (0.1,), "adaptive_target": (-1,),
    "adaptive_decay": (0.9,), "tfs_z": (1,), "top_a": (0,), "n_probs": (0,), "min_keep": (0,), "samplers": ([],),
    "post_sampling_probs": (False,), "return_tokens": (False,), "response_fields": ([],), "lora": ([],),
    "image_data": ([],), "reasoning_format": ("auto", "none"), "reasoning_budget_tokens": (-1,),
    "thinking_budget_tokens": (), "thinking_forced_open": (False,),
    # transformers' generate, and chat templates
    "num_beams": (1,), "num_beam_groups": (1,), "no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,), "eta_cutoff": (0,), "penalty_alpha": (0,), "guidance_scale": (1,),
    "enable_thinking": (),
}  # fmt: skip
# Fields of completions and chats that other APIs do not have -> values that have no effect.
CONSTRAINT_INERT_VALUES: dict[str, tuple[Any, ...]] = {
    "structured_outputs": (), "guided_json": ({}, ""), "guided_regex": ("",), "guided_choice": ([],),
    "guided_grammar": ("",),
}  # fmt: skip
# Field -> the field that turns it on. With an inert value of that one in the request, any value is accepted.
SWITCHES = {
    "dry_base": "dry_multiplier", "dry_allowed_length": "dry_multiplier", "dry_penalty_last_n": "dry_multiplier",
    "dry_sequence_breakers": "dry_multiplier",
    "xtc_threshold": "xtc_probability", "dynatemp_exponent": "dynatemp_range", "adaptive_decay": "adaptive_target",
    "repeat_last_n": "repeat_penalty", "mirostat_tau": "mirostat", "mirostat_eta": "mirostat",
    "length_penalty": "use_beam_search", "early_stopping": "use_beam_search",
}  # fmt: skip
# Field -> our name for it. If the request has our field with the same value, it is accepted.
OUR_NAMES = {
    "n_predict": "max_tokens", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "n_cmpl": "n",
    "repeat_penalty": "repetition_penalty", "sampling_seed": "seed", "truncate": "truncate_prompt_tokens",
    "return_full_text": "echo", "return_prompt_token_ids": "return_token_ids", "return_tokens": "return_token_ids",
}  # fmt: skip
ALTERNATIVES = {
    **dict.fromkeys(
        ("grammar", "json_schema", "regex", "ebnf", "guided_json_object"), "use response_format or structured_outputs"
    ),
    **dict.fromkeys(CONSTRAINT_INERT_VALUES, "send the request to /v1/chat/completions"),
    "guided_json": "use response_format", "output_format": "use response_format",
    **dict.fromkeys(("functions", "function_call"), "use tools and tool_choice"),
    **dict.fromkeys(("n_probs", "top_n_tokens"), "use logprobs"),
    "do_sample": "use a temperature of 0", "enable_thinking": "send it in chat_template_kwargs",
    "reasoning": "use reasoning_effort", "extra_body": "send its fields beside the others",
}  # fmt: skip


def check_unsupported_fields(
    request: SamplingRequest, inert_values: Mapping[str, tuple[Any, ...]] = INERT_VALUES,
    field_names: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Raises ApiError 400 for the first unsupported field that has an effect. field_names: in that API."""
    fields, field_names = request.model_extra, field_names or {}
    if not fields:
        return
    for name, value in fields.items():
        if value is None or name not in inert_values or value in inert_values[name]:
            continue
        if not _has_no_effect(name, value, fields, request):
            alternative = f"use {OUR_NAMES[name]}" if name in OUR_NAMES else ALTERNATIVES.get(name, "")
            alternative = f"use {name}" if name in field_names else alternative
            if "structured_outputs" in inert_values:  # of an API that does not have this field
                alternative = alternative.removesuffix(" or structured_outputs")
            message = f"{name} is not supported" + (f"; {rename(alternative, field_names)}" if alternative else "")
            raise bad_request(message, name, "unsupported_parameter")


def rename(text: str, field_names: Mapping[str, str]) -> str:
    """The text with the names of ChatRequest's fields replaced by those of another API."""
    if not field_names:
        return text
    return re.sub(rf"\b({'|'.join(field_names)})\b", lambda match: field_names[match[0]], text)


def rename_error(error: ApiError, field_names: Mapping[str, str]) -> ApiError:
    """The error with the names of ChatRequest's fields replaced by those of the client's API. A place in `messages`
    becomes the field alone, because the client's items have other indices.
    """
    param = field_names.get((error.param or "").partition("[")[0], error.param)
    message = rename(error.message, field_names)
    return ApiError(error.status, message, param, error.code, headers=error.headers)


def _has_no_effect(name: str, value: Any, fields: Mapping[str, Any], request: SamplingRequest) -> bool:
    """Whether another field of the request has the same effect, or turns this one off."""
    if name == "do_sample":
        return value is False and request.temperature == 0
    if our_name := OUR_NAMES.get(name):
        own_value = request.max_new_tokens if our_name == "max_tokens" else getattr(request, our_name, None)
        return bool(value == own_value)
    switch = SWITCHES.get(name)
    return switch is not None and switch in fields and fields[switch] in INERT_VALUES[switch]
