"""What a model is, found by running it on fake tensors; and who is refused, by name and with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tcdeploy.errors import UnsupportedModelError
from tcdeploy.models.probe import PROBE_ATTN_IMPLEMENTATION, probe
from tests.model_families import LAYERS, SUPPORTED, UNSUPPORTED, WINDOW


@pytest.mark.parametrize("family", list(UNSUPPORTED))
def test_a_model_that_cannot_be_served_is_refused_by_name(family: str) -> None:
    sizes, reason = UNSUPPORTED[family]
    with pytest.raises(UnsupportedModelError) as caught:
        probe(AutoConfig.for_model(family, **sizes))
    assert caught.value.message.startswith(family)
    assert reason in caught.value.message
    assert caught.value.exit_code == 1 and caught.value.hint


@pytest.mark.parametrize("family", list(SUPPORTED))
def test_the_facts_are_those_of_the_model(family: str) -> None:
    config = AutoConfig.for_model(family, **SUPPORTED[family])
    found = probe(config)
    model = AutoModelForCausalLM.from_config(config)
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.class_name == type(model).__name__
    assert (found.context, found.vocab_size) == (512, 256)
    assert len(found.attention_layers) == config.num_hidden_layers >= LAYERS
    assert {(one.heads, one.head_dim, one.v_head_dim) for one in found.attention_layers} == {(4, 16, 16)}
    assert {one.kv_heads for one in found.attention_layers} == {4 if family == "gpt2" else 2}


def test_windows_soft_caps_and_sinks_are_seen_layer_by_layer() -> None:
    def spec(family: str) -> Any:
        return probe(AutoConfig.for_model(family, **SUPPORTED[family])).attention_layers

    assert [one.window for one in spec("mistral")] == [WINDOW] * LAYERS
    assert sorted({one.window for one in spec("gemma2")}) == [0, WINDOW]
    assert {one.softcap for one in spec("gemma2")} == {2.0}
    assert {one.softcap for one in spec("llama")} == {0.0}
    assert all(one.has_sinks for one in spec("gpt_oss")) and not any(one.has_sinks for one in spec("llama"))


def test_a_window_that_only_the_mask_knows_is_refused() -> None:
    """Phi-MoE builds a sliding mask and does not tell attention: it would see too far."""
    sizes = {**SUPPORTED["mixtral"], "sliding_window": 100}
    with pytest.raises(UnsupportedModelError, match="has a sliding window of 100 but does not pass it to attention"):
        probe(AutoConfig.for_model("phimoe", **sizes))
    assert probe(AutoConfig.for_model("phimoe", **{**sizes, "sliding_window": None})).attention_layers


def test_longrope_is_known_to_switch_at_its_original_length() -> None:
    factors = [1.0] * 8
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 256}  # fmt: skip
    sizes = {**SUPPORTED["llama"], "rope_parameters": rope, "original_max_position_embeddings": 256}
    assert probe(AutoConfig.for_model("phi3", **sizes)).longrope_limit == 256
    assert probe(AutoConfig.for_model("phi3", **SUPPORTED["phi3"])).longrope_limit == 0


def test_an_unknown_keyword_to_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    def with_bias(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        return ALL_ATTENTION_FUNCTIONS[PROBE_ATTN_IMPLEMENTATION](
            module, query, key, value, mask, position_bias=query, **kwargs
        )

    class Interface:
        def get_interface(self, name: str, default: Any) -> Any:
            return with_bias

    monkeypatch.setattr(modeling_llama, "ALL_ATTENTION_FUNCTIONS", Interface())
    with pytest.raises(UnsupportedModelError, match="passes position_bias to attention"):
        probe(AutoConfig.for_model("llama", **SUPPORTED["llama"]))


def test_a_large_model_is_probed_without_its_memory(tmp_path: Path) -> None:
    """70 billion parameters on this machine, in a moment: nothing is allocated."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
             "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}  # fmt: skip
    found = probe(AutoConfig.for_model("llama", **sizes))
    assert 70e9 < found.parameters < 71e9
    assert found.kv_elements_per_token == 80 * 8 * 2 * 128
