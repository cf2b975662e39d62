"""Copies of models whose checkpoints have scales of K and V, and what attention over an FP8 cache computes."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tcdeploy.engine.check.reference import reference_attn_implementation
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.start.model_code import load_uncompiled

WEIGHTS = "model.safetensors"


def save_with_tensors(source: Path, folder: Path, tensors: Mapping[str, Tensor]) -> Path:
    """A copy of the model in `source` with more tensors in its checkpoint."""
    shutil.copytree(source, folder)
    save_file({**load_file(source / WEIGHTS), **tensors}, folder / WEIGHTS, {"format": "pt"})
    return folder


def layer_scales(layers: int, k: float, v: float) -> dict[str, Tensor]:
    """k_scale and v_scale of each layer as compressed-tensors stores them; no two are equal."""
    return {
        f"model.layers.{layer}.self_attn.{name}": torch.tensor([value * (1 + layer / 10)])
        for layer in range(layers)
        for name, value in (("k_scale", k), ("v_scale", v))
    }


class RoundingReference:
    """The model uncompiled, with transformers' attention over K and V that are rounded as in an FP8 cache."""

    def __init__(self, folder: Path | str, cache_dir: Path | str, **flags: Any) -> None:
        given = {"model": str(folder), "cache_dir": str(cache_dir), "kv_dtype": "fp8", **flags}
        planned, self._runner = load_uncompiled(build_recipe(given, environ={}))
        self._implementation = reference_attn_implementation(planned.architecture, planned.plan)

    def logits(self, token_ids: list[int]) -> Tensor:
        """Of all positions, [tokens, vocab]."""
        return self._runner.reference_logits([token_ids], list(range(len(token_ids))), self._implementation)[0]

    def likeliest(self, prompt: list[int], tokens: list[int]) -> list[int]:
        """The most likely token in the place of each of `tokens`, which follow the prompt: `tokens`, if greedy."""
        return self.logits(prompt + tokens)[len(prompt) - 1 : -1].argmax(-1).tolist()
