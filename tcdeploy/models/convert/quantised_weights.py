"""Finds the quantised weights of a checkpoint, and puts them into a traced model.

transformers does not see them. It loads a stand-in for each, which has the name and shape of the dense weight, so that
its renames apply. Afterwards, a linear layer with a stand-in becomes a `SchemeLinear` with the stored tensors beside
that name. A stand-in anywhere else is an error, because a merge or a permutation of dense rows and columns does not say
what happens to scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedConfig

from tcdeploy.errors import ModelError, UnsupportedModelError
from tcdeploy.models.convert.quantisation import NOT_QUANTISED_HINT, TensorHeader, quantisation_method, schemes_of
from tcdeploy.models.convert.scheme_linear import SchemeLinear
from tcdeploy.models.convert.traced_tensor import Trace, TracedTensor
from tcdeploy.models.weights.reader import DTYPES
from tcdeploy.models.weights.sources import dtype_name, stored_names
from tcdeploy.models.weights.tensor_names import first_names
from tcdeploy.planning.schemes import Scheme

STAND_IN_DTYPE = "F32"
HINT = "download the model again, or use the config.json that belongs to these weights"


class QuantisedWeight(NamedTuple):
    """The weight [rows, columns] of a linear layer, and the names of its tensors in the checkpoint, in order."""

    scheme: Scheme
    names: tuple[str, ...]
    shape: tuple[int, int]


def find_quantised_weights(
    model: str, config: PreTrainedConfig, tensors: Mapping[str, TensorHeader]
) -> dict[str, QuantisedWeight]:
    """The quantised weights among the tensors of a checkpoint, by the name of the dense weight.

    Raises ModelError for weights that lack a tensor, or have one of another shape or dtype.
    """
    scheme_of = schemes_of(config)
    weights: dict[str, QuantisedWeight] = {}
    for path in dict.fromkeys(name.rpartition(".")[0] for name in tensors):
        scheme = scheme_of(path)
        if scheme is not None and _is_quantised(scheme, path, tensors):
            weights[f"{path}.weight"] = _quantised_weight(model, scheme, path, tensors)
    return weights


def _is_quantised(scheme: Scheme, path: str, tensors: Mapping[str, TensorHeader]) -> bool:
    """Whether any tensor of a layer shows that it is: norms and embeddings, which are not, have a `weight` too."""
    return any(
        header is not None and (suffix != "weight" or _dtype(header) == dtype)
        for suffix, dtype, _ in scheme.tensors
        for header in [tensors.get(f"{path}.{suffix}")]
    )


def _quantised_weight(model: str, scheme: Scheme, path: str, tensors: Mapping[str, TensorHeader]) -> QuantisedWeight:
    names = tuple(f"{path}.{tensor.suffix}" for tensor in scheme.tensors)
    for name in names:
        if name not in tensors:
            raise ModelError(f"the checkpoint of {model} lacks {name}, which its weights in {scheme.name} need", HINT)
    headers = [tensors[name] for name in names]
    try:
        rows, columns = scheme.dense_shape([header.shape for header in headers])
    except (ValueError, IndexError):
        shapes = ", ".join(f"{name} {[*header.shape]}" for name, header in zip(names, headers, strict=True))
        raise ModelError(
            f"tensors of {model} have shapes that are impossible in {scheme.name}: {shapes}", HINT
        ) from None
    for name, header, tensor in zip(names, headers, scheme.tensors, strict=True):
        if not tensor.fits(header.shape, rows, columns) or _dtype(header) != tensor.dtype:
            stored = f"{_dtype(header)} {[*header.shape]}"
            sizes = ", ".join("groups" if size is None else str(size) for size in tensor.shape(rows, columns))
            message = f"{name} of {model} is stored as {stored}; {scheme.name} requires {tensor.dtype} [{sizes}]"
            raise ModelError(message, HINT)
    return QuantisedWeight(scheme, names, (rows, columns))


def _dtype(header: TensorHeader) -> str:
    return dtype_name(DTYPES[header.dtype]) if header.dtype in DTYPES else header.dtype


def with_stand_ins(
    tensors: Mapping[str, TensorHeader], weights: Mapping[str, QuantisedWeight]
) -> dict[str, TensorHeader]:
    """The tensors of a checkpoint as transformers sees them."""
    quantised = {name for weight in weights.values() for name in weight.names}
    dense = {name: header for name, header in tensors.items() if name not in quantised}
    return dense | {name: TensorHeader(STAND_IN_DTYPE, weight.shape) for name, weight in weights.items()}


def insert_quantised_weights(
    model: nn.Module, name: str, config: PreTrainedConfig, weights: Mapping[str, QuantisedWeight], trace: Trace
) -> None:
    """Replace the linear layers of a traced model whose weights are stand-ins, in place.

    name: of the model, for errors. trace: of the checkpoint as it is stored. Raises ModelError if a stand-in is left,
    or if a layer is dense that has a scheme according to config.json.
    """
    scheme_of = schemes_of(config)
    dense: list[str] = []
    for path, module in list(model.named_modules()):
        scheme = scheme_of(path) if type(module) is nn.Linear else None
        if scheme is None:
            continue
        weight = _stand_in(module.weight, weights)
        if weight is None:
            dense.append(f"{path}.weight")
        elif weight.scheme is scheme:
            layer = SchemeLinear(scheme, [trace.tensor(item) for item in weight.names], module.bias)
            model.set_submodule(path, layer)
    _check_no_stand_in(model, name, weights, trace)
    if dense:
        raise ModelError(f"weights of {name} are not quantised as config.json says: {first_names(dense)}", HINT)


def _stand_in(tensor: Tensor, weights: Mapping[str, QuantisedWeight]) -> QuantisedWeight | None:
    match getattr(tensor, "source", None):
        case ["tensor", stored]:
            return weights.get(stored)
    return None


def _check_no_stand_in(model: nn.Module, name: str, weights: Mapping[str, QuantisedWeight], trace: Trace) -> None:
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, TracedTensor) and tensor.origin is not trace:
            for stored in stored_names(tensor.source):
                if stored in weights:
                    scheme = weights[stored].scheme.name
                    message = f"{stored} of {name} is stored in {scheme}, and cannot be made into {path}"
                    reason = f"that must be the whole weight of a linear layer which has {scheme} in config.json"
                    raise UnsupportedModelError(f"{message}: {reason}", NOT_QUANTISED_HINT)


def loading_refusal(model: str, config: PreTrainedConfig, reason: str) -> UnsupportedModelError:
    """The error for weights in a scheme that only transformers could load, for this reason."""
    message = f"the weights of {model}, quantised with {quantisation_method(config)}, cannot be loaded: {reason}"
    return UnsupportedModelError(message, f"download safetensors files (hf download), or {NOT_QUANTISED_HINT}")
