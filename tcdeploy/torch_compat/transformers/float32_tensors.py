"""Names of the tensors that transformers loads in float32, although the model has another dtype.

A model's class lists them as patterns: `_keep_in_fp32_modules_strict` for float16 and bfloat16 (such as the correction
biases of expert routers), `_keep_in_fp32_modules` for float16 only (such as the norms of gpt-oss). `from_pretrained`
applies them; `from_config`, which creates random weights and the probe's model, does not.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from tcdeploy.torch_compat.internal import find, has_parameters, internal

DTYPE_PLAN = "transformers:PreTrainedModel._get_dtype_plan"


@internal(
    "float32 weights", "transformers.PreTrainedModel._get_dtype_plan",
    "weights that a half-precision model keeps in float32 are planned, and drawn at random, in half precision",
)  # fmt: skip
def supported() -> bool:
    return has_parameters(find(DTYPE_PLAN), "dtype")


def float32_tensors(model: Any, dtype: torch.dtype) -> set[str]:
    """Names in the state dict of those tensors that `from_pretrained(dtype=dtype)` loads in float32 instead."""
    if dtype == torch.float32 or not supported():
        return set()
    dtypes: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    patterns = [pattern.replace("*", ".*") for pattern, kept in dtypes.items() if kept == torch.float32]
    if not patterns:
        return set()
    matches = re.compile("|".join(patterns)).search
    tensors = {name: item for name, item in model.state_dict().items() if isinstance(item, torch.Tensor)}
    return {name for name, tensor in tensors.items() if tensor.is_floating_point() and matches(name)}
