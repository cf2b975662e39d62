"""Bytes and FLOPs of a step, against models small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MixtralConfig

from tcdeploy.bench import floor as floor_module
from tcdeploy.bench.floor import (
    UNIFORM_ROUTING,
    ExpertSizes,
    Rates,
    WeightSizes,
    count_weights,
    decode_floor,
    kv_read_bytes,
    measure_rates,
    prefill_floor_ms,
)
from tests.machines import LLAMA_8B, attention_layers

RATES = Rates(3e12, 1 << 30, 8e14, 8192, "bfloat16")
EMBEDDING = 32 * 16


def small(config_class: Any = LlamaConfig, **overrides: Any) -> Any:
    config = config_class(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        **overrides,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def bytes_of(model: Any) -> int:
    return 4 * sum(parameter.numel() for parameter in model.parameters())


def test_an_untied_embedding_is_not_read() -> None:
    model = small(tie_word_embeddings=False)
    weights = count_weights(model, bytes_of(model))
    assert weights.step_bytes == bytes_of(model) - 4 * EMBEDDING
    assert weights.body_parameters == bytes_of(model) // 4 - 2 * EMBEDDING


def test_a_tied_embedding_is_read_as_the_head() -> None:
    model = small(tie_word_embeddings=True)
    weights = count_weights(model, bytes_of(model))
    assert weights.step_bytes == bytes_of(model)
    assert weights.body_parameters == bytes_of(model) // 4 - EMBEDDING


EXPERT = 3 * 16 * 24  # parameters of one expert of a layer


def test_a_token_reads_its_top_k_experts_and_more_tokens_those_that_are_expected() -> None:
    """Two layers of four experts. The second token selects each expert that the first has not with half a chance."""
    model = small(MixtralConfig, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False)
    weights = count_weights(model, bytes_of(model))
    dense_bytes = bytes_of(model) - 4 * EMBEDDING - 4 * 8 * EXPERT
    for tokens, experts in ((1, 2), (2, 3), (3, 3.5)):
        expected = dense_bytes + 4 * 2 * experts * EXPERT
        assert weights.bytes_read(tokens) == expected
        floor = decode_floor(weights, 5000, RATES, tokens)
        assert floor.bytes_moved == expected + tokens * 5000
        assert floor.floor_ms == pytest.approx(floor.bytes_moved / 3e9)
    assert weights.parameters_per_token == bytes_of(model) // 4 - 2 * EMBEDDING - 4 * EXPERT
    fast_memory = replace(RATES, copy_bytes_per_second=1e30)
    assert prefill_floor_ms(128, fast_memory, weights) == pytest.approx(
        2 * weights.parameters_per_token * 128 / 8e14 * 1e3
    )
    slow_memory = replace(RATES, copy_bytes_per_second=1e3)
    assert prefill_floor_ms(1, slow_memory, weights) == pytest.approx(weights.bytes_read(1))
    assert weights.notes == (UNIFORM_ROUTING,)


def test_biases_of_experts_are_read_with_them() -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 8, "layer_types": ["full_attention"] * 2}
    model = small(GptOssConfig, **sizes)
    expert = EXPERT + 2 * 24 + 16
    assert count_weights(model, bytes_of(model)).experts == ExpertSizes(4 * 8 * expert, 8 * expert, 4, 1)


def test_a_mixture_whose_selection_is_not_known_has_no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(MixtralConfig, num_local_experts=4, num_experts_per_tok=2)
    monkeypatch.setattr(floor_module, "TOP_K_KEYS", ())
    weights = count_weights(model, bytes_of(model))
    assert not weights.has_floor and weights.notes == ()
    assert decode_floor(weights, 5000, RATES, 1).floor_ms is None
    assert prefill_floor_ms(128, RATES, weights) is None


def test_a_sliding_window_limits_the_bytes_of_the_kv_cache() -> None:
    architecture = replace(LLAMA_8B, layer_states=(*attention_layers(1), *attention_layers(1, window=100)))
    assert kv_read_bytes(architecture, "bfloat16", 512) == 2 * 8 * 256 * (512 + 100)
    assert kv_read_bytes(architecture, "bfloat16", 60) == 2 * 8 * 256 * (60 + 60)


def test_the_floor_of_a_decode_step_is_bytes_over_bandwidth() -> None:
    """Llama 8B: 15.0 GB of weights, and 128 KiB of KV cache per token."""
    weights = WeightSizes(15_009_669_120, 6_979_588_096)
    floor = decode_floor(weights, kv_read_bytes(LLAMA_8B, "bfloat16", 512), RATES, batch=16)
    assert floor.bytes_moved == 15_009_669_120 + 16 * 512 * 131072
    assert floor.floor_ms == pytest.approx(floor.bytes_moved / 3e9)


def test_the_floor_of_a_prefill_is_the_larger_of_reading_and_arithmetic() -> None:
    weights = WeightSizes(15_000_000_000, 7_000_000_000)
    assert prefill_floor_ms(1, RATES, weights) == pytest.approx(5.0)
    assert prefill_floor_ms(2048, RATES, weights) == pytest.approx(2 * 7e9 * 2048 / 8e14 * 1e3)
    assert prefill_floor_ms(2048, RATES, weights, in_fp8=True) == pytest.approx(7e9 * 2048 / 8e14 * 1e3)
    assert prefill_floor_ms(1, RATES, weights, in_fp8=True) == pytest.approx(5.0)


def test_rates_of_this_machine_are_plausible() -> None:
    """Wide bounds that still catch a wrong unit: between 100 MB/s and 10 TB/s."""
    rates = measure_rates("cpu", "float32")
    assert 1e8 < rates.copy_bytes_per_second < 1e13
    assert 1e8 < rates.matmul_flop_per_second < 1e14
