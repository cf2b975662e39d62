"""Probing models on fake tensors, and rejecting unsupported ones with the reason."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tcdeploy.errors import ARCHITECTURE_HINT, UnsupportedModelError
from tcdeploy.models import probe as probe_module
from tcdeploy.models.probe import PROBE_ATTN_IMPLEMENTATION, probe_model
from tcdeploy.torch_compat.dynamo.fake_tensors import OtherTensorError, has_data, only_meta_tensors
from tests.model_families import LAYERS, SUPPORTED, UNSUPPORTED, WINDOW, probe


@pytest.mark.parametrize("family", list(UNSUPPORTED))
def test_an_unsupported_model_is_rejected_with_the_reason(family: str) -> None:
    sizes, reason = UNSUPPORTED[family]
    with pytest.raises(UnsupportedModelError) as caught:
        probe(AutoConfig.for_model(family, **sizes))
    assert caught.value.message.startswith(family)
    assert reason in caught.value.message
    assert caught.value.exit_code == 1 and caught.value.hint == ARCHITECTURE_HINT


@pytest.mark.parametrize("family", list(SUPPORTED))
def test_the_architecture_matches_the_real_model(family: str) -> None:
    config = AutoConfig.for_model(family, **SUPPORTED[family])
    architecture = probe(config)
    model = AutoModelForCausalLM.from_config(config)
    tensors = [*model.parameters(), *model.buffers()]
    assert architecture.weight_bytes["float32"] == sum(tensor.nbytes for tensor in tensors)
    assert architecture.class_name == type(model).__name__
    assert (architecture.context, architecture.vocab_size) == (512, 256)
    assert len(architecture.attention_layers) == config.num_hidden_layers >= LAYERS
    assert {(spec.heads, spec.head_dim, spec.v_head_dim) for spec in architecture.attention_layers} == {(4, 16, 16)}
    assert {spec.kv_heads for spec in architecture.attention_layers} == {4 if family == "gpt2" else 2}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_experts_hold_the_outputs_of_all_that_a_token_selects(family: str) -> None:
    """Two experts: 192 outputs of gate and up beside 96 inputs of the down projection, and two hidden states of 64."""
    architecture = probe(AutoConfig.for_model(family, **SUPPORTED[family]))
    assert architecture.peak_activation_elements == 2 * (192 + 96) + 2 * 64
    narrow = probe(AutoConfig.for_model(family, **{**SUPPORTED[family], "intermediate_size": 16}))
    assert narrow.peak_activation_elements == 64 + (64 + 32 + 32) + 2 * 64, "attention is wider"


def test_windows_soft_caps_and_sinks_are_read_per_layer() -> None:
    @functools.cache
    def specs(family: str) -> Any:
        return probe(AutoConfig.for_model(family, **SUPPORTED[family])).attention_layers

    assert [layer.window for layer in specs("mistral")] == [WINDOW] * LAYERS
    assert sorted({layer.window for layer in specs("gemma2")}) == [0, WINDOW]
    assert {layer.softcap for layer in specs("gemma2")} == {2.0}
    assert {layer.softcap for layer in specs("llama")} == {0.0}
    assert all(layer.has_sinks for layer in specs("gpt_oss")) and not any(layer.has_sinks for layer in specs("llama"))


def test_a_window_that_is_only_in_the_mask_is_rejected() -> None:
    """Phi-MoE builds a sliding mask but does not pass the window to attention."""
    sizes = {**SUPPORTED["mixtral"], "sliding_window": 100}
    with pytest.raises(UnsupportedModelError, match="has a sliding window of 100 but does not pass it to attention"):
        probe(AutoConfig.for_model("phimoe", **sizes))
    assert probe(AutoConfig.for_model("phimoe", **{**sizes, "sliding_window": None})).attention_layers


def test_longrope_is_limited_to_its_original_length() -> None:
    factors = [1.0] * 8
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": factors, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 256}  # fmt: skip
    sizes = {**SUPPORTED["llama"], "rope_parameters": rope, "original_max_position_embeddings": 256}
    assert probe(AutoConfig.for_model("phi3", **sizes)).rope_limit == 256
    assert probe(AutoConfig.for_model("phi3", **SUPPORTED["phi3"])).rope_limit == 0


@pytest.mark.parametrize("family", ["llama", "internlm3", "gemma3_text"])
def test_dynamic_rope_is_limited_to_the_length_up_to_which_it_is_static(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have the family")
    rope: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    if family == "gemma3_text":
        rope = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    sizes = {**SUPPORTED.get(family, SUPPORTED["llama"]), "rope_parameters": rope}
    assert probe(AutoConfig.for_model(family, **sizes)).rope_limit == sizes["max_position_embeddings"]


def test_dynamic_rope_with_a_fixed_alpha_is_static() -> None:
    rope = {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0, "rope_theta": 1e4}
    config = AutoConfig.for_model("hunyuan_v1_dense", **{**SUPPORTED["qwen3"], "rope_parameters": rope})
    assert probe(config).rope_limit == 0


def test_a_forward_pass_that_reads_tensors_on_the_host_is_refused_with_this_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe_module, "freeze_rope", lambda model: None)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(UnsupportedModelError, match="its forward pass reads values of tensors on the host") as raised:
        probe(AutoConfig.for_model("llama", **{**SUPPORTED["llama"], "rope_parameters": rope}))
    assert raised.value.hint.startswith("tcdeploy explain MODEL")


def test_longrope_of_one_type_of_layer_is_limited_too() -> None:
    """Gemma's configs have rope parameters per type of layer."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 128}  # fmt: skip
    by_layer_type = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    sizes = {**SUPPORTED["gemma3_text"], "rope_parameters": by_layer_type}
    assert probe(AutoConfig.for_model("gemma3_text", **sizes)).rope_limit == 128


@pytest.mark.parametrize("family", ["gemma3", "modernbert-decoder", "phi4_multimodal"])
def test_a_model_whose_initialisation_needs_values_is_probed(family: str) -> None:
    """`trunc_normal_` reads its tensor, which a fake tensor does not allow. The probe needs no initial weights."""
    assert probe(AutoConfig.for_model(family)).attention_layers


def test_a_value_of_the_wrong_type_is_an_error_with_a_hint() -> None:
    """Llama's config accepts any value under a key that it does not know."""
    config = AutoConfig.for_model("llama", **SUPPORTED["llama"], sliding_window="wide")
    with pytest.raises(UnsupportedModelError, match="the config of llama has a value that cannot be used") as error:
        probe(config)
    assert "config.json" in error.value.hint


def test_a_keyword_that_attention_ignores_is_accepted() -> None:
    """GOT-OCR2 passes `logits_to_keep` through its layers to attention."""
    assert probe(AutoConfig.for_model("got_ocr2")).attention_layers


def test_an_unknown_attention_keyword_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_probing_a_large_model_allocates_no_memory(tmp_path: Path) -> None:
    """70 billion parameters, on any machine."""
    sizes = {"hidden_size": 24576, "intermediate_size": 92160, "num_hidden_layers": 8, "num_attention_heads": 192,
             "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072}  # fmt: skip
    architecture = probe(AutoConfig.for_model("llama", **sizes))
    assert 140e9 < architecture.weight_bytes["bfloat16"] < 142e9
    assert architecture.kv_elements_per_token == 8 * 8 * 2 * 128


def refuse_real_tensors(build: Any) -> Any:
    """Let the first attempt fail, whose tensors are real because the test replaces `only_meta_tensors`."""

    def checked(*args: Any) -> Any:
        model = build(*args)
        assert not any(has_data(parameter) for parameter in model.parameters())
        return model

    return checked


@pytest.mark.parametrize("family", list(SUPPORTED))
def test_meta_and_fake_tensors_give_the_same_result(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AutoConfig.for_model(family, **SUPPORTED[family])
    results = []
    for is_fake in (False, True):
        if is_fake:
            monkeypatch.setattr(probe_module, "only_meta_tensors", torch.no_grad)
            monkeypatch.setattr(probe_module, "_build", refuse_real_tensors(probe_module._build))
        probed = probe_model(config)
        tensors = [*probed.model.named_parameters(), *probed.model.named_buffers()]
        results.append((probed.architecture, [(name, tensor.shape, tensor.dtype) for name, tensor in tensors]))
        assert family != "llama" or {tensor.is_meta for _, tensor in tensors} == {not is_fake}
    assert results[0] == results[1]


def test_operations_on_real_tensors_are_refused_among_meta_tensors() -> None:
    real = torch.ones(2)
    with only_meta_tensors():
        assert (torch.ones(2) + torch.arange(2)).is_meta
        for use in (lambda: real * 2, lambda: torch.ones(2, device="cpu"), lambda: real.sum().item()):
            with pytest.raises(OtherTensorError):
                use()


def test_a_model_that_reads_a_real_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading it would succeed among meta tensors, but such a model cannot be traced."""
    table, forward = torch.ones(64), LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: forward(self, x) * (table * 2).sum().item())
    with pytest.raises(UnsupportedModelError, match="its forward pass reads values of tensors on the host"):
        probe(AutoConfig.for_model("llama", **SUPPORTED["llama"]))
