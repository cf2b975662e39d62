"""Makes a model with random weights on the device (`--load-format dummy`), each matrix in its scheme.

A quantised model is often run because the dense one does not fit into the GPU's memory, so the dense one must never
exist. While transformers builds the model, the matrices of linear layers and experts are replaced by meta tensors as
soon as modules register them. `draw_dummy_weights` then visits the modules in their order, and each matrix is created,
drawn and quantised before the next one. The peak is the finished model, and the temporaries of CHUNK_ELEMENTS elements,
or of one weight in a scheme whose rows cannot be quantised apart.

Everything else is created on the device and initialised by transformers: vectors, embeddings, convolutions and buffers
such as rotary factors, whose values are not random. transformers creates each matrix with `torch.empty` before it is
replaced, so one dense matrix at a time also exists while the model is built, when no other matrix does.

Rejected: building the whole model on the meta device. The values of buffers, and of parameters such as Mamba's decay
rates, would have to be computed again, for which models outside transformers have no interface.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedConfig, PreTrainedModel

from tcdeploy.models.auto_classes import auto_class, model_class
from tcdeploy.models.convert.attention_interface import with_interface
from tcdeploy.models.convert.quantise_model import (
    QuantisableWeight,
    quantisable_weights,
    quantise_model,
    quantise_values,
)
from tcdeploy.models.convert.scheme_experts import NAMES
from tcdeploy.models.formats.methods import scheme_finder
from tcdeploy.models.weights.dummy_weights import draw_dummy_weights
from tcdeploy.planning.plan import Plan
from tcdeploy.torch_compat.transformers.experts_interface import is_experts_class
from tcdeploy.torch_compat.transformers.float32_tensors import float32_tensors
from tcdeploy.torch_compat.transformers.initialization import mark_as_loaded

DUMMY_SEED = 0
CHUNK_ELEMENTS = 1 << 24  # of a weight that are drawn and quantised at once, if that is whole experts or blocks of rows


def dummy_model(plan: Plan, config: PreTrainedConfig, attn_implementation: str) -> PreTrainedModel:
    """Random weights, created on the device; equal for equal config, device and torch version.

    They have the dtypes of loaded weights, so that both run the same programs.
    """
    dtype = getattr(torch, plan.weight_dtype)
    torch.manual_seed(DUMMY_SEED)

    def build(implementation: str) -> PreTrainedModel:
        model: PreTrainedModel = auto_class(config, plan.trust_remote_code).from_config(
            config, dtype=dtype, attn_implementation=implementation, trust_remote_code=plan.trust_remote_code
        )
        return model

    with torch.device(plan.device), _matrices_on_meta():
        model: PreTrainedModel = with_interface(model_class(config, plan.trust_remote_code), attn_implementation, build)
    tensors: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name in float32_tensors(model, dtype):
        tensors[name].data = tensors[name].data.float()
    _make_shared_matrices(model, plan.device)
    scheme_of = scheme_finder(config)
    quantisable = {item.path: item for item in quantisable_weights(model, scheme_of)}

    def make_matrix(path: str, module: nn.Module, name: str, std: float) -> None:
        item = quantisable.get(path if isinstance(module, nn.Linear) else f"{path}.{name}")
        if item is None:
            setattr(module, name, _random_parameter(module.get_parameter(name), std, plan.device))
        else:
            item.replace(_random_in_scheme(item, std, plan.device))

    draw_dummy_weights(model, make_matrix)
    quantise_model(model, scheme_of)  # those that several modules share
    return model


@contextlib.contextmanager
def _matrices_on_meta() -> Iterator[None]:
    """In the block, weights of new linear layers and experts are replaced by meta tensors.

    The weight of an embedding is kept, also when a linear head that shares it registers it again.
    """
    kept: dict[int, nn.Parameter] = {}

    def replace(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or id(parameter) in kept:
            return None
        is_linear = type(module) is nn.Linear and name == "weight"
        is_stack = name in NAMES and parameter.ndim == 3 and is_experts_class(type(module))
        if is_linear or is_stack:
            matrix = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
            mark_as_loaded(matrix)  # drawing values on the meta device would take 0.1 s for 8B
            return matrix
        kept[id(parameter)] = parameter
        return None

    handle = register_module_parameter_registration_hook(replace)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def _make_shared_matrices(model: nn.Module, device: str) -> None:
    """Create the matrices on the meta device that several modules share, so that all keep sharing one."""
    places = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter.is_meta
    ]
    counts = Counter(id(parameter) for _, _, parameter in places)
    made: dict[int, nn.Parameter] = {}
    for module, name, parameter in places:
        if counts[id(parameter)] > 1:
            if id(parameter) not in made:
                made[id(parameter)] = _random_parameter(parameter, 1.0, device)
            setattr(module, name, made[id(parameter)])


def _random_parameter(like: Tensor, std: float, device: str) -> nn.Parameter:
    return nn.Parameter(_random(like.shape, std, like.dtype, device), requires_grad=False)


def _random(shape: torch.Size | tuple[int, ...], std: float, dtype: torch.dtype, device: str) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(0.0, std)


def _random_in_scheme(item: QuantisableWeight, std: float, device: str) -> list[Tensor]:
    """The tensors of the scheme. item: its weight is on the meta device."""
    weight = item.weight
    shapes = quantise_values(item.scheme, weight, item.group_size)  # also on the meta device
    tensors = [torch.empty(like.shape, dtype=like.dtype, device=device) for like in shapes]
    starts = [0 for _ in tensors]
    for length in _chunk_lengths(item, weight):
        values = _random((length, *weight.shape[1:]), std, weight.dtype, device)
        for index, part in enumerate(quantise_values(item.scheme, values, item.group_size)):
            tensors[index][starts[index] : starts[index] + len(part)] = part
            starts[index] += len(part)
    return tensors


def _chunk_lengths(item: QuantisableWeight, weight: Tensor) -> list[int]:
    """Of the first dimension: experts, or rows in whole blocks, of which the last may be incomplete."""
    block = 1 if weight.ndim == 3 else item.scheme.row_block or len(weight)
    blocks = CHUNK_ELEMENTS // (block * weight[0].numel())
    length = max(1, blocks) * block
    return [min(length, len(weight) - start) for start in range(0, len(weight), length)]
