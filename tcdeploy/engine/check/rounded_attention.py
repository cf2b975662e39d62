"""transformers' own attention over K and V that are rounded as an FP8 cache stores them.

The reference of the parity check has no cache. With `--kv-dtype fp8`, a reference that attends over K and V of 16 bits
would differ from every bucket by the rounding to 3 bits of mantissa, and limits that allow for this would hide faults.
So both passes of the reference round, with the scales of the model, and then call the attention that they would call
otherwise. The rounding is written out here, and shares no code with the ops that it checks.

An attention function of transformers is chosen by name, and so is the function that makes its mask. Each of the two
that references use is registered under a second name. Imports transformers in functions: starts from packages import
this module, and have no transformers.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn

ROUNDED = {"sdpa": "tcdeploy-fp8-sdpa", "eager": "tcdeploy-fp8-eager"}  # by name of the function without rounding
FP8 = torch.float8_e4m3fn


def register_rounded_attention() -> None:
    """Register the names in ROUNDED with transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(ROUNDED["sdpa"], _sdpa)
    ALL_ATTENTION_FUNCTIONS.register(ROUNDED["eager"], _eager)
    for name, rounded in ROUNDED.items():
        ALL_MASK_ATTENTION_FUNCTIONS.register(rounded, ALL_MASK_ATTENTION_FUNCTIONS[name])


def _sdpa(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *_round(module, key, value), *args, **kwargs)


def _eager(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The eager function is part of each family's modelling code."""
    family = sys.modules[type(module).__module__]
    return family.eager_attention_forward(module, query, *_round(module, key, value), *args, **kwargs)


def _round(module: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """K and V after a pass through the cache. A module without scales, such as an audio tower's, has no cache."""
    scales: Tensor | None = getattr(module, "kv_scales", None)  # models/convert/kv_scales.py
    if scales is None:
        return key, value
    largest = torch.finfo(FP8).max
    stored = [
        (x / scale).clamp(-largest, largest).to(FP8) for x, scale in zip((key, value), scales.split(1), strict=True)
    ]
    k, v = ((x.float() * scale).to(key.dtype) for x, scale in zip(stored, scales.split(1), strict=True))
    return k, v
