"""A model that `tcdeploy quantize` saved in FP8 starts from a bundle without a compiler and without extras."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tcdeploy.host.progress import NullProgress
from tcdeploy.models.location import BUILTIN_MODELS
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.quantize import save_quantised
from tests.conftest import TINY, RunCLI
from tests.start.test_packaged_start import FLAGS, run_script, transformers_tokens


def test_a_saved_fp8_model_starts_from_a_bundle_without_a_compiler(tmp_path: Path, run_cli: RunCLI) -> None:
    """The tokens are those of transformers with the dequantised weights."""
    model, bundle, unpacked = tmp_path / "fp8", str(tmp_path / "fp8.tcb"), str(tmp_path / "unpacked")
    save_quantised(Recipe(model=TINY, quantize="fp8"), model, NullProgress())
    packed = run_cli("cache", "pack", str(model), *FLAGS, "--cache-dir", str(tmp_path / "cache"), "--out", bundle)
    assert packed.returncode == 0, packed.stderr
    assert run_cli("cache", "unpack", bundle, unpacked, "--allow-unsigned").returncode == 0
    tokens, outcomes, imported = run_script(unpacked, str(model))
    assert (outcomes, imported) == ([["hit", 0]] * 2, [])
    assert tokens == transformers_tokens(dequantised_model(model))


def dequantised_model(folder: Path) -> torch.nn.Module:
    dense = AutoModelForCausalLM.from_pretrained(BUILTIN_MODELS[TINY], dtype=torch.float32)
    tensors = load_file(folder / "model.safetensors")
    scales = {name: tensors.pop(f"{name}_scale") for name in list(tensors) if f"{name}_scale" in tensors}
    assert scales and all(tensors[name].dtype == torch.float8_e4m3fn for name in scales)
    values = {
        name: tensor.float() * scales[name].float() if name in scales else tensor for name, tensor in tensors.items()
    }
    missing, unexpected = dense.load_state_dict(values, strict=False)
    assert not unexpected and all(name == "lm_head.weight" for name in missing)
    return dense
