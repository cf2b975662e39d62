"""Models whose weights are GGUF files have the weights that the files hold, in every architecture that is supported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tcdeploy.models.formats import gguf_weights
from tcdeploy.models.weights import gguf_names, gguf_values
from tcdeploy.models.weights.conversions import CONVERSIONS
from tcdeploy.planning.memory import gib
from tests.exported_programs import exported_programs
from tests.formats.checkpoint import WEIGHTS, change_json, random_weight, save_source, write_dense
from tests.formats.gguf import FILE, write_gguf
from tests.formats.test_format_starts import tokens_of, tokens_of_transformers
from tests.formats.test_readers import dense_weights, plan

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "tie_word_embeddings": False}, "mistral": {}, "mixtral": {}, "qwen2": {},
    "qwen3": {}, "qwen2_moe": {"shared_expert_intermediate_size": 256}, "qwen3_moe": {}, "gemma": {}, "gemma2": {},
    "gemma3_text": {}, "phi3": {}, "gpt_oss": {},
}  # fmt: skip
CASES = (
    [("llama", kind) for kind in ("F16", "BF16", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K")]
    + [(family, "Q8_0") for family in FAMILIES]
    + [("gpt_oss", "MXFP4"), ("gpt_oss", "BF16"), ("qwen3_moe", "Q4_K_M"), ("mixtral", "F16")]
)


def save_varied(folder: Path, family: str, **changes: Any) -> Path:
    """As `save_source`, but without vectors of equal values, such as weights of norms, or zeros, such as biases."""
    save_source(folder, family, **{**FAMILIES[family], **changes})
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        if tensor.ndim == 1 or name.endswith("_bias"):
            tensors[name] = (tensor.float() + random_weight(1, *tensor.shape, seed=name)[0]).to(tensor.dtype)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def assert_equal_weights(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() >= expected.keys()
    different = [name for name, values in expected.items() if not torch.equal(weights[name], values)]
    assert not different


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_all_weights_are_those_of_the_file(family: str, kind: str, tmp_path: Path) -> None:
    source = save_varied(tmp_path / "source", family)
    dense = write_gguf(source, tmp_path / "model", kind)
    expected = dense_weights(plan(write_dense(source, dense, tmp_path / "dense")))
    assert_equal_weights(dense_weights(plan(tmp_path / "model" / FILE)), expected)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_gate_and_up_of_experts_may_be_in_one_tensor(family: str, tmp_path: Path) -> None:
    source = save_varied(tmp_path / "source", family)
    dense = write_gguf(source, tmp_path / "model", "Q8_0", is_fused=True)
    expected = dense_weights(plan(write_dense(source, dense, tmp_path / "dense")))
    assert_equal_weights(dense_weights(plan(tmp_path / "model")), expected)


@pytest.mark.parametrize("pieces", [1, 5])
def test_rows_are_read_in_pieces(pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole heads of rows in the order of llama.cpp; in a real model, a piece is 8 MiB in float32."""
    monkeypatch.setattr(gguf_weights, "PIECE_ELEMENTS", 256 * 256 // pieces)
    source = save_varied(tmp_path / "source", "llama")
    dense = write_gguf(source, tmp_path / "model", "Q4_K_M")
    expected = dense_weights(plan(write_dense(source, dense, tmp_path / "dense")))
    planned = plan(tmp_path / "model")
    assert_equal_weights(dense_weights(planned), expected)
    assert planned.traced_model is not None
    embedding = planned.traced_model.sources["model.embed_tokens.weight"]
    assert embedding[0] == ("convert" if pieces == 1 else "cat")


def _swapped(packed: Tensor) -> Tensor:
    return torch.cat([packed >> 4, packed & 15], -1)


def _without_minimums(packed: Tensor) -> tuple[Tensor, Tensor]:
    scales, minimums = SCALES_AND_MINIMUMS(packed)
    return scales, minimums * 0


SCALES_AND_MINIMUMS = gguf_values._scales_and_minimums
FLOAT16 = gguf_values._float16
LLAMA, GEMMA = gguf_names.FAMILIES["llama"], gguf_names.FAMILIES["gemma2"]
FAULTS: dict[str, tuple[str, str, Any, str, Any]] = {  # family, kind, and what replaces an attribute or a value
    "nibbles in another order": ("llama", "Q4_K_M", gguf_values, "_nibbles", _swapped),
    "minimum dropped": ("llama", "Q4_K_M", gguf_values, "_scales_and_minimums", _without_minimums),
    "scale off": ("llama", "Q6_K", gguf_values, "_float16", lambda blocks, begin: FLOAT16(blocks, begin) * 1.01),
    "codes in another order": (
        "llama", "Q4_0", CONVERSIONS, "q4_0_nibbles", lambda tensors: gguf_values.q4_0_nibbles(tensors).flip(-1),
    ),
    "order of rows ignored": (
        "llama", "Q8_0", gguf_names.FAMILIES, "llama", LLAMA._replace(has_permuted_heads=False),
    ),
    "norms with GGUF's 1": ("gemma2", "Q8_0", gguf_names.FAMILIES, "gemma2", GEMMA._replace(norm_offset=0.0)),
    "gate and up swapped": (
        "qwen3_moe", "Q8_0", gguf_weights.EXPERT_PARTS, "gate_exps", ("w1", "up_proj"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_mistake_in_reading_changes_weights(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the tests above cannot pass by chance."""
    family, kind, owner, name, replacement = FAULTS[fault]
    source = save_varied(tmp_path / "source", family)
    dense = write_gguf(source, tmp_path / "model", kind)
    expected = dense_weights(plan(write_dense(source, dense, tmp_path / "dense")))
    (monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr)(owner, name, replacement)
    if fault == "gate and up swapped":
        monkeypatch.setitem(owner, "up_exps", ("w3", "gate_proj"))
    with pytest.raises(AssertionError):
        assert_equal_weights(dense_weights(plan(tmp_path / "model")), expected)


def test_the_plan_shows_what_is_dequantised(tmp_path: Path) -> None:
    source = save_varied(tmp_path / "source", "llama", intermediate_size=512)
    write_gguf(source, tmp_path / "model", "Q4_K_M")
    planned = plan(tmp_path / "model", dtype="bfloat16")
    lines = [(item.value, item.reason) for item in planned.plan.decisions if item.name == "dequantised to bfloat16"]
    better = 2 * (256 * 512 + 64 * 256) + 256 * 256
    common = 2 * (2 * 512 * 256 + 256 * (64 + 2 * 256)) + 256 * 256
    assert lines == [
        (gib(2 * common), "Q4_K of GGUF has no kernel"), (gib(2 * better), "Q6_K of GGUF has no kernel")
    ]  # fmt: skip
    write_gguf(source, tmp_path / "eight", "Q8_0")
    assert plan(tmp_path / "eight").architecture.schemes == {"int8": 15}
    assert planned.architecture.schemes == {}


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_weights_in_a_scheme_take_the_bytes_of_the_file(kind: str, tmp_path: Path) -> None:
    """Scales of Q8_0 take 4 bytes instead of 2."""
    source = save_varied(tmp_path / "source", "qwen3", tie_word_embeddings=False, vocab_size=8)
    write_gguf(source, tmp_path / "model", kind)
    planned = plan(tmp_path / "model", dtype="bfloat16")
    assert planned.plan.weight_bytes <= 1.07 * (tmp_path / "model" / FILE).stat().st_size
    assert planned.architecture.schemes == {{"Q8_0": "int8", "Q4_0": "int4_float16"}[kind]: 15}


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_tied_head_stays_dense(is_tied: bool, tmp_path: Path) -> None:
    source = save_varied(tmp_path / "source", "llama", tie_word_embeddings=is_tied)
    write_gguf(source, tmp_path / "model", "Q8_0")
    assert plan(tmp_path / "model").architecture.schemes == {"int8": 14 + (not is_tied)}


def test_a_head_in_the_file_is_used_although_the_config_ties_it(tmp_path: Path) -> None:
    source = save_varied(tmp_path / "source", "llama", tie_word_embeddings=False)
    dense = write_gguf(source, tmp_path / "model", "Q4_K_M")
    change_json(tmp_path / "model/config.json", {"tie_word_embeddings": True})
    weights = dense_weights(plan(tmp_path / "model"))
    assert torch.equal(weights["lm_head.weight"], dense["lm_head.weight"])
    assert torch.equal(weights["model.embed_tokens.weight"], dense["model.embed_tokens.weight"])
    assert not torch.equal(dense["lm_head.weight"], dense["model.embed_tokens.weight"])


def test_tokens_are_those_of_dequantised_weights_also_from_packages(tmp_path: Path) -> None:
    source = save_varied(tmp_path / "source", "llama")
    dense = write_gguf(source, tmp_path / "model", "Q4_0", parts=2)
    write_dense(source, dense, tmp_path / "dense")
    with exported_programs():
        tokens, first = tokens_of(tmp_path / "model", tmp_path / "cache")
        again, second = tokens_of(tmp_path / "model" / "model-00001-of-00002.gguf", tmp_path / "cache")
    assert tokens == again == tokens_of_transformers(tmp_path / "dense") and len(set(tokens[0])) > 3
    assert first.engine.runner.has_model and not second.engine.runner.has_model
    assert second.weights_read.num_bytes == first.weights_read.num_bytes
