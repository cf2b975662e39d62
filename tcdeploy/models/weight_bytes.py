"""Bytes of a model's weights in device memory, from the probe's fake model: per tensor, by the dtype of the model."""

from __future__ import annotations

import torch
from torch import nn

from tcdeploy.models.convert.scheme_weight import SchemeWeight
from tcdeploy.torch_compat.transformers.float32_tensors import float32_tensors

PROBE_DTYPE = torch.bfloat16  # of the fake model: grouped expert GEMMs support no other dtype on fake tensors


def weight_bytes(model: nn.Module, dtype: str) -> dict[str, int]:
    """By name, the bytes of each parameter and buffer of the fake model if it is loaded in `dtype`; tied ones once.

    Tensors of other dtypes than PROBE_DTYPE keep them: the modelling code sets them, as it does for rotary frequencies.
    Those of quantised weights have the dtypes of their scheme.
    """
    loaded_dtype = getattr(torch, dtype)
    in_float32 = float32_tensors(model, loaded_dtype)
    in_scheme = {
        id(tensor) for module in model.modules() if isinstance(module, SchemeWeight) for tensor in module.tensors
    }
    sizes: dict[str, int] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kept = tensor.dtype
        if id(tensor) not in in_scheme:
            kept = torch.float32 if name in in_float32 else loaded_dtype if kept == PROBE_DTYPE else kept
        sizes[name] = tensor.numel() * kept.itemsize
    return sizes
