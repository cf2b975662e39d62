"""A subset of scripts/coverage: one model type per architectural feature.

The programs are traced and not compiled. docs/models.md has the table of all types. Most types are started with
scripts/test --long only. start/test_packaged_families.py compares the tokens of the types of model_families.py, in
exported programs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.coverage.campaign import Result, check_type, model_types, table
from tests.coverage.small_configs import LAYERS, representative, small_config
from tests.coverage.weights import check_weights

SERVED = {
    "llama": "RMSNorm, rotary embedding, grouped queries, gated MLP",
    "gpt2": "learned positions, LayerNorm, Conv1D, fused QKV, tied head",
    "opt": "learned positions with an offset",
    "gpt_neox": "parallel attention and MLP, partial rotary embedding",
    "qwen2": "biases of Q, K and V",
    "qwen3": "norms of Q and K",
    "gemma2": "soft-capping, sliding windows, scaled embedding, norms after each block",
    "gpt_oss": "sinks, experts with biases",
    "mixtral": "experts",
    "deepseek_v3": "multi-head latent attention, shared experts, groups of experts",
    "phi3": "fused QKV and fused gate and up",
    "cohere2": "layers without positions, scaled logits, one norm per layer",
    "glm4": "interleaved rotary embedding",
    "olmo2": "norms after each block only",
    "granite": "multipliers of embedding, attention, residual and logits",
    "minimax_m2": "rotary embedding of a part of the head, norms across heads",
    "gemma3n_text": "layers that share keys and values with earlier ones",
    "qwen3_5_text": "gated delta nets",
    "nemotron_h": "Mamba-2 mixers, layers that are an MLP only",
    "falcon_h1": "layers with attention and a mixer",
    "lfm2": "short convolutions",
    "jamba": "Mamba-1 mixers beside attention",
    "minimax": "lightning attention",
    "gptj": "attention in a method of the module",
    "falcon": "attention in the module's forward pass",
    "modernbert-decoder": "initialisation that reads weights, biases of norms left out",
}
TEXT_ONLY = {
    "gemma3": "a multimodal class in the causal mapping",
    "mistral3": "a vision tower and a projector around Mistral",
    "qwen2_5_vl": "rotary embedding with three position axes",
    "llava": "a text model that the config names",
    "voxtral": "an audio tower",
}
REFUSED = {
    "bart": "computes token positions of its own",
    "kosmos-2.5": "computes token positions of its own",
    "llama4_text": "layers of type chunked_attention",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock is not supported",
    "bitnet": "quantised with bitnet",
    "mpt": "never calls transformers' AttentionInterface",
    "bert": "is not causal",
    "blip-2": "requires inputs other than text",
}


# Latent attention; layers without positions; a multimodal class. Learned positions are in packaged starts of gpt2.
ALWAYS = ("deepseek_v3", "cohere2", "gemma3")


def with_marks(model_type: str) -> Any:
    return pytest.param(model_type, marks=() if model_type in ALWAYS else pytest.mark.long)


@pytest.mark.parametrize("model_type", map(with_marks, [*SERVED, *TEXT_ONLY]))
def test_a_type_gives_the_answers_of_transformers(model_type: str, tmp_path: Path) -> None:
    result = check_type(model_type, str(tmp_path), compiles=False)
    assert result.verdict == ("served as text only" if model_type in TEXT_ONLY else "served"), result.reason


@pytest.mark.parametrize("model_type", map(with_marks, [*SERVED, *TEXT_ONLY]))
def test_the_weights_of_a_type_are_found_in_its_checkpoint(model_type: str) -> None:
    result = check_weights(model_type)
    assert result.verdict == "equal", result.reason


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_type_is_refused_with_the_reason(model_type: str, tmp_path: Path) -> None:
    result = check_type(model_type, str(tmp_path), compiles=False)
    assert result.verdict == "refused" and REFUSED[model_type] in result.reason, result


def test_all_causal_and_multimodal_types_are_tried() -> None:
    types = model_types()
    assert {*SERVED, *TEXT_ONLY, *REFUSED} <= {*types}
    assert len(types) > 200


def test_small_configs_keep_each_kind_of_layer() -> None:
    assert representative(["full", "full", "sliding", "full", "linear"]) == [0, 1, 2, 4]
    config = small_config("gemma3_text")
    assert len(config.layer_types) == LAYERS and {*config.layer_types} == {"full_attention", "sliding_attention"}


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("x requires inputs other than text: 'pixel_values'", "inputs other than text are required"),
        ("x requires fla, which is not installed", "packages that are not installed"),
        ("x cannot be run on fake tensors, so it cannot be traced: You must specify pixel_values",
         "inputs other than text are required"),
        ("x cannot be run on fake tensors, so it cannot be traced: its forward pass has tensors whose size depends on "
         "values of other tensors (aten.nonzero.default)", "code with data-dependent shapes"),
        ("x cannot be served, for 2 reasons:\n  - x has no max_position_embeddings in its config\n  - x never calls "
         "transformers' AttentionInterface", "attention code outside of transformers' AttentionInterface"),
        ("x is quantised with fp8, which is not supported yet", "quantised weights"),
        ("x has no max_position_embeddings in its config", "no max_position_embeddings in the config"),
        ("an unknown message", "other reasons"),
    ],
)  # fmt: skip
def test_a_refusal_is_listed_by_the_reason_in_its_message(message: str, reason: str) -> None:
    assert f"| refused: {reason} | 1 | | x |" in table([Result("x", "refused", message)])


def test_the_table_has_a_row_per_verdict_and_per_reason_of_refusal() -> None:
    results = [
        Result("b", "served", packages="started"),
        Result("a", "served", packages="the model's code was needed"),
        Result("c", "refused", "c: layer 0 is not causal"),
        Result("d", "refused", "d: layer 1 is not causal"),
    ]
    assert table(results).splitlines()[2:] == [
        "| served | 2 | 1 | a, b |",
        "| refused: attention that is not causal | 2 | | c, d |",
    ]
