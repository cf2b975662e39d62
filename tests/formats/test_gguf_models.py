"""Models whose weights are GGUF files have the weights that the files hold, in every architecture that is supported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.formats.checkpoint import WEIGHTS, random_weight, save_source, write_dense
from tests.formats.gguf import FILE, write_gguf
from tests.formats.test_readers import dense_weights, plan

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "tie_word_embeddings": False}, "mistral": {}, "mixtral": {}, "qwen2": {},
    "qwen3": {}, "qwen2_moe": {"shared_expert_intermediate_size": 256}, "qwen3_moe": {}, "gemma": {}, "gemma2": {},
    "gemma3_text": {}, "phi3": {}, "gpt_oss": {},
}  # fmt: skip
CASES = [("llama", kind) for kind in ("F16", "BF16", "Q4_0", "Q4_K_M", "Q5_K_M", "Q6_K")] + [
    (family, "Q8_0") for family in FAMILIES
]


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
