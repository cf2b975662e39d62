"""Compares the weights that starts load from their files with those that `from_pretrained` loads, bit by bit.

Each type's small random model is saved in the layout of published checkpoints and in that of the model, and loaded in
two dtypes. scripts/coverage --weights runs all types that are served.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tcdeploy.errors import ModelError
from tcdeploy.kernels.attention.interface import ATTN_IMPLEMENTATION
from tcdeploy.models.auto_classes import auto_class
from tcdeploy.models.load_model import load_model
from tcdeploy.models.weights.dummy_weights import draw_dummy_weights
from tcdeploy.models.weights.sources import copy_stored, describe_weights, loading_weights
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.start.decide import decide, trace_weights
from tests.coverage.campaign import BUCKETS, Result
from tests.coverage.small_configs import small_config

LAYOUTS = {"published": True, "the model's": False}
DTYPES = ("float32", "bfloat16")


def check_weights(model_type: str) -> Result:
    """Save, describe and load a small model of the type.

    verdict: "equal", "refused" (before weights are read), "not traced" (so that transformers loads them), or
        "wrong". reason: of the refusal, or the first exception or difference with its layout and dtype.
    """
    start = time.perf_counter()
    verdict, reason = _check_weights(model_type)
    return Result(model_type, verdict, reason, seconds=round(time.perf_counter() - start, 1))


def _check_weights(model_type: str) -> tuple[str, str]:
    try:
        config = small_config(model_type)
        model_class = auto_class(config, trust_remote_code=False)
        torch.manual_seed(0)
        model = model_class.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        draw_dummy_weights(model)
    except Exception as error:
        return "refused", f"{type(error).__name__}: {error}"
    for layout, is_original in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, save_original_format=is_original)
            for dtype in DTYPES:
                try:
                    recipe = build_recipe({"model": folder, "dtype": dtype, "cache_dir": folder, **BUCKETS}, environ={})
                    planned = decide(recipe)
                except ModelError as error:
                    return "refused", error.message
                try:
                    difference = _difference(planned, Path(folder))
                except Exception as error:
                    return "not traced", f"{layout} layout, {dtype}: {type(error).__name__}: {error}"
                if difference:
                    return "wrong", f"{layout} layout, {dtype}: {difference}"
    return "equal", ""


def _difference(planned: Any, folder: Path) -> str:
    """The first tensor that differs from the one of `from_pretrained`; "" if all are equal.

    The weights are loaded as by a start with the model's code, and as by one from packages.
    """
    groups = planned.architecture.packed_linears
    expected = _tensors(load_model(planned.plan, planned.config, ATTN_IMPLEMENTATION, groups))
    traced = trace_weights(planned)
    loaded = load_model(planned.plan, planned.config, ATTN_IMPLEMENTATION, groups, traced)
    described = describe_weights(loaded, traced.sources, traced.checkpoint)
    with loading_weights(described.sources, traced.checkpoint, "cpu") as loading:
        pass
    copy_stored(described, loading.tensors)
    return _compare(_tensors(loaded), expected) or _compare(loading.tensors, expected)


def _compare(loaded: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    if loaded.keys() != expected.keys():
        return f"other names: {loaded.keys() ^ expected.keys()}"
    for name, tensor in expected.items():
        if loaded[name].dtype != tensor.dtype or not torch.equal(_bytes(loaded[name]), _bytes(tensor)):
            return name
    addresses = {name: tensor.data_ptr() for name, tensor in expected.items() if tensor.numel()}
    loaded_addresses = {name: loaded[name].data_ptr() for name in addresses}
    tied, loaded_tied = (len(set(each.values())) for each in (addresses, loaded_addresses))
    return "" if tied == loaded_tied else f"{loaded_tied} tensors that are not tied, not {tied}"


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    parameters, buffers = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    return {name: tensor.detach() for name, tensor in (*parameters, *buffers)}


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor
