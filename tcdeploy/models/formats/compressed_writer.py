"""The form in which compressed-tensors stores the weights of `tcdeploy quantize`, which transformers and vLLM load.

    fp8   float-quantized  weight float8_e4m3fn [n, k]; weight_scale bfloat16 [n, 1]
    int8  pack-quantized   weight_packed int32 [n, ceil(k / 4)]; weight_scale bfloat16 [n, 1]; weight_shape int64 [2]
    int4  pack-quantized   weight_packed int32 [n, k / 8]; weight_scale [n, k / group]; weight_shape int64 [2]

Packed codes are unsigned, the first column in the lowest bits. For int4 these are the bytes of the scheme.

Rejected: int-quantized for int8. vLLM loads it only with a format for activations, and then quantises those too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tcdeploy.models.formats.quantised_weight import LayerScheme
from tcdeploy.models.weights.writer import TensorSpec
from tcdeploy.planning.quantize_request import QuantizeRequest
from tcdeploy.planning.schemes import SCHEMES

WORD_BYTES = 4
INT8_OFFSET = 128
BITS = {"fp8": 8, "int8": 8, "int4": 4}
FORMATS = {"fp8": "float-quantized", "int8": "pack-quantized", "int4": "pack-quantized"}


def stored_tensors(request: QuantizeRequest, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """A weight as compressed-tensors stores it, by suffix, from the tensors of its scheme."""
    codes, scale = tensors
    rows = len(codes)
    if request.numbers == "fp8":
        return {"weight": codes, "weight_scale": scale.bfloat16().view(rows, 1)}
    if request.numbers == "int4":
        columns, packed = 2 * codes.shape[1], codes
    else:
        columns, scale = codes.shape[1], scale.bfloat16()
        unsigned = (codes.to(torch.int16) + INT8_OFFSET).to(torch.uint8)
        packed = functional.pad(unsigned, (0, -columns % WORD_BYTES))
    words = packed.contiguous().view(torch.int32)
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor([rows, columns])}


def stored_specs(request: QuantizeRequest, scheme: LayerScheme, shape: tuple[int, int]) -> dict[str, TensorSpec]:
    """The dtypes and shapes of `stored_tensors` for a weight of this shape."""
    weight = torch.empty(shape, device="meta")
    tensors = stored_tensors(request, SCHEMES[scheme.scheme].quantise(weight, scheme.group_size or shape[1]))
    return {suffix: TensorSpec(tensor.dtype, tuple(tensor.shape)) for suffix, tensor in tensors.items()}


def settings(request: QuantizeRequest, ignored: Iterable[str]) -> Mapping[str, Any]:
    """quantization_config of config.json.

    With fp8, each token's inputs are quantised too, as with `--quantize fp8` (planning/activations.py).
    """
    weights: dict[str, Any] = {
        "num_bits": BITS[request.numbers], "type": "float" if request.numbers == "fp8" else "int", "symmetric": True,
        "strategy": "group" if request.group_size else "channel", "group_size": request.group_size or None,
        "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {},
    }  # fmt: skip
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    form = FORMATS[request.numbers]
    group = {
        "targets": ["Linear"], "weights": weights, "input_activations": inputs if request.numbers == "fp8" else None,
        "output_activations": None, "format": form,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": [*ignored], "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }  # fmt: skip
