"""Finds the quantised weights of a checkpoint, and puts them into a traced model.

transformers does not see them. It loads a stand-in for each, which has the name and shape of the dense weight, so that
its renames, merges and permutations apply. Afterwards, a linear layer whose weight is a stand-in becomes a
`SchemeLinear` if the format has a scheme, and stacked experts become `SchemeExperts` (scheme_experts.py). All other
stand-ins are replaced by the dequantised weights, which threads compute while they read the files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from tcdeploy.errors import ModelError, UnsupportedModelError
from tcdeploy.models.convert.scheme_experts import (
    CannotFollowError,
    join_scheme_tensors,
    stacked_weights,
)
from tcdeploy.models.convert.scheme_linear import SchemeLinear
from tcdeploy.models.convert.scheme_weight import SchemeExperts
from tcdeploy.models.convert.traced_tensor import Trace, TracedTensor
from tcdeploy.models.formats.layer_names import core_name
from tcdeploy.models.formats.methods import (
    METHODS,
    NOT_QUANTISED_HINT,
    quantisation_method,
    quantisation_settings,
)
from tcdeploy.models.formats.quantised_weight import HINT, Layer, LayerScheme, QuantisedWeight, in_linear_order
from tcdeploy.models.weights.files import STAND_IN_DTYPE, TensorHeader
from tcdeploy.models.weights.reader import THREADS, StoredTensor, read_tensor
from tcdeploy.models.weights.sources import WeightSource, replace_tensors, stored_names
from tcdeploy.planning.schemes import SCHEMES

# Ends of the names of tensors that belong to a quantised weight.
QUANTISED_SUFFIXES = (
    "_weight_qdata",
    "weight_scale",
    "weight_scale_inv",
    "weight_packed",
    "qweight",
    "SCB",
    "weight.absmax",
)
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")  # of weights that hold values of their own
WEIGHTS = ("weight", "gate_up_proj", "down_proj", "gate_up_proj_blocks", "down_proj_blocks")


class InsertedWeights(NamedTuple):
    """schemes: of linear layers and stacked experts, by path. dequantised: elements of other weights, by reason."""

    schemes: dict[str, LayerScheme]
    dequantised: dict[str, int]


def find_quantised_weights(
    model: str, config: PreTrainedConfig, tensors: Mapping[str, StoredTensor], known: Collection[str]
) -> dict[str, QuantisedWeight]:
    """The quantised weights among the tensors of a checkpoint, by the name of the dense weight.

    known: the names of the model's tensors. A bias of zeros that is not among them belongs to the quantised weight,
    because AutoGPTQ stores one for layers without a bias. Raises ModelError for weights that lack a tensor or have one
    of another shape or dtype, and for scales that are zero, infinite, NaN or negative.
    """
    method, settings = METHODS.get(quantisation_method(config) or ""), quantisation_settings(config) or {}
    if method is None:
        return {}
    layers: dict[str, dict[str, StoredTensor]] = defaultdict(dict)
    for name, stored in tensors.items():
        path, is_part, part = name.partition(".weight.")
        path, suffix = (path, f"weight.{part}") if is_part else name.rpartition(".")[::2]
        layers[path][suffix] = stored
    weights = {
        f"{path}.{suffix}": weight
        for path, stored_of_layer in layers.items()
        for suffix, weight in method.find(settings, Layer(model, path, stored_of_layer)).items()
        if weight is not None
    }
    known = {core_name(name) for name in known}
    for name, weight in weights.items():
        bias = f"{name.removesuffix('weight')}bias"
        if bias in tensors and core_name(bias) not in known and not read_tensor(tensors[bias]).any():
            weights[name] = weight._replace(names=(*weight.names, bias))
        if name in tensors and name not in weight.names:
            message = f"{model} has two weights for one layer: {name}, and {weight.names[0]}"
            raise ModelError(message, "save the model again with only one of them")
    _check_scales(model, weights.values(), tensors, method.has_negative_scales)
    return weights


def _check_scales(
    model: str, weights: Iterable[QuantisedWeight], tensors: Mapping[str, StoredTensor], may_be_negative: bool
) -> None:
    """Raise ModelError for scales that are zero, infinite, NaN or negative. Reads all scales, in threads."""
    names = [name for weight in weights for name in weight.scales]
    with ThreadPoolExecutor(THREADS) as threads:
        problems = threads.map(lambda name: _scale_problem(read_tensor(tensors[name]).float(), may_be_negative), names)
        for name, problem in zip(names, problems, strict=True):
            if problem:
                raise ModelError(f"{name} of {model} has a scale that is {problem}", HINT)


def _scale_problem(scales: Tensor, may_be_negative: bool) -> str:
    if scales.isnan().any():
        return "not a number"
    if scales.isinf().any():
        return "infinite"
    if (scales == 0).any():
        return "zero"
    return "negative" if not may_be_negative and (scales < 0).any() else ""


def check_not_quantised(model: str, tensors: Mapping[str, TensorHeader]) -> None:
    """Raise UnsupportedModelError for a tensor whose name or dtype shows a quantised weight.

    tensors: with stand-ins, so that only weights remain that no format has recognised.
    """
    for name, tensor in tensors.items():
        is_quantised = tensor.dtype not in FLOAT_DTYPES and name.endswith(WEIGHTS)
        if is_quantised or name.endswith(QUANTISED_SUFFIXES):
            message = f"{model} has quantised weights, which are not supported yet: {name} has the dtype {tensor.dtype}"
            raise UnsupportedModelError(message, NOT_QUANTISED_HINT)


def with_stand_ins(
    tensors: Mapping[str, TensorHeader], weights: Mapping[str, QuantisedWeight]
) -> dict[str, TensorHeader]:
    """The tensors of a checkpoint as transformers sees them."""
    quantised = {name for weight in weights.values() for name in weight.names}
    dense = {name: header for name, header in tensors.items() if name not in quantised}
    return dense | {name: TensorHeader(STAND_IN_DTYPE, weight.shape) for name, weight in weights.items()}


def insert_quantised_weights(model: nn.Module, weights: Mapping[str, QuantisedWeight], trace: Trace) -> InsertedWeights:
    """Put the quantised weights into a traced model, in place. trace: of the checkpoint as it is stored.

    Raises UnsupportedModelError for a quantised Conv1D of transformers (GPT-2): its weight is [inputs, outputs], but
    formats store [outputs, inputs]. If both are equal, the shapes do not show it.
    """
    schemes: dict[str, LayerScheme] = {}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for path, module in list(model.named_modules()):
        is_linear = type(module) is nn.Linear and id(module.weight) not in embeddings  # a tied head stays dense
        weight = _stand_in(module.weight, weights) if is_linear else None
        if type(module) is Conv1D and _stand_in(module.weight, weights):
            raise UnsupportedModelError(f"{path} is a quantised Conv1D, which is not supported", NOT_QUANTISED_HINT)
        if weight is not None and weight.scheme:
            weight = in_linear_order(weight)
            tensors = [_traced(source, trace) for source in weight.tensors]
            layer = SchemeLinear(SCHEMES[weight.scheme], tensors, module.bias)
            model.set_submodule(path, layer)
            schemes[path] = layer.layer_scheme
    reasons = _insert_experts(model, weights, trace, schemes)
    dense = {name: weight.dense for name, weight in weights.items()}
    dequantised: dict[str, int] = defaultdict(int)
    for tensor in _traced_tensors(model, trace):
        if used := [name for name in stored_names(tensor.source) if name in weights]:
            if reason := reasons.get(id(tensor)) or _reason(weights[used[0]]):
                dequantised[reason] += tensor.numel()
            tensor.source, tensor.origin = replace_tensors(tensor.source, dense), trace
    return InsertedWeights(schemes, dict(dequantised))


def _insert_experts(
    model: nn.Module, weights: Mapping[str, QuantisedWeight], trace: Trace, schemes: dict[str, LayerScheme]
) -> dict[int, str]:
    """Replace the stacked experts that can keep their schemes, and add these to `schemes`.

    Returns for each of the others the reason why it cannot, by id of the tensor.
    """
    reasons: dict[int, str] = {}
    for stacked in list(stacked_weights(model)):
        tensor = stacked.tensor
        if not isinstance(tensor, TracedTensor) or not any(name in weights for name in stored_names(tensor.source)):
            continue
        try:
            joined = join_scheme_tensors(tensor.source, weights, stacked.is_transposed)
        except CannotFollowError as error:
            reasons[id(tensor)] = str(error)
            continue
        tensors = [_traced(source, trace) for source in joined.tensors]
        experts = SchemeExperts(SCHEMES[joined.scheme], tensors, len(tensors[0]))
        stacked.replace(experts)
        schemes[stacked.path] = experts.layer_scheme
    return reasons


def _reason(weight: QuantisedWeight) -> str:
    """Why a weight is dequantised; "" if the checkpoint stores its values."""
    kernels = "has kernels only for linear layers, and for experts whose class supports transformers' interface"
    return weight.reason or (f"{weight.scheme} {kernels}" if weight.scheme else "")


def _traced(source: WeightSource, trace: Trace) -> TracedTensor:
    like = torch.empty(source.shape, dtype=getattr(torch, source.dtype), device="meta")
    return TracedTensor(source.source, like, trace)


def _stand_in(tensor: Tensor, weights: Mapping[str, QuantisedWeight]) -> QuantisedWeight | None:
    match getattr(tensor, "source", None):
        case ["tensor", stored]:
            return weights.get(stored)
    return None


def _traced_tensors(model: nn.Module, trace: Trace) -> Iterator[TracedTensor]:
    """The traced tensors of a model that may contain stand-ins, each once."""
    for _, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, TracedTensor) and tensor.origin is not trace:
            yield tensor


def loading_refusal(model: str, config: PreTrainedConfig, reason: str) -> UnsupportedModelError:
    """The error for quantised weights that only transformers could load, for this reason."""
    message = f"the weights of {model}, quantised with {quantisation_method(config)}, cannot be loaded: {reason}"
    return UnsupportedModelError(message, f"download safetensors files (hf download), or {NOT_QUANTISED_HINT}")
