"""The decoder layers of a model during export: replaces their calls, binds their state, and finds what they return."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tcdeploy.kernels.attention.metadata import Step
from tcdeploy.kernels.state.layer_state import LayerBinding
from tcdeploy.planning.dtypes import dtype_name
from tcdeploy.programs.model_forward import StepInputs, step_tensors
from tcdeploy.programs.regions import LayerKind
from tcdeploy.torch_compat.dynamo.compiled_call import get_compiled_call, set_compiled_call
from tcdeploy.torch_compat.dynamo.fake_tensors import fake_tensors

log = logging.getLogger("tcdeploy.programs")


class TracedLayer(NamedTuple):
    """A decoder layer of the model, and the objects in which its modules find their state and the step."""

    module: nn.Module
    path: str
    bindings: tuple[LayerBinding, ...]
    state_names: tuple[str, ...]  # as in a step program
    kind: LayerKind

    @property
    def named_state(self) -> dict[str, Tensor]:
        tensors = (tensor for binding in self.bindings for tensor in binding.state)
        return dict(zip(self.state_names, tensors, strict=True))


class LayerOutput(NamedTuple):
    """What a layer returns: a tensor, or a tuple or list whose first item is a tensor."""

    tuple_length: int = 0  # 0: a tensor
    dtype: str = ""  # of the tensor; "": that of the layer's input


class _AllKindsReturned(Exception):  # noqa: N818 - it ends a forward pass early
    pass


def find_outputs(model: nn.Module, layers: Sequence[TracedLayer], inputs: StepInputs) -> list[LayerOutput]:
    """What each layer returns, found by a forward pass on fake tensors until a layer of each kind has returned.

    The layers of Bamba and Falcon-H1 return tuples, those of OpenAI GPT lists. Those of Mamba-2 return float32 whatever
    the model's dtype.
    """
    all_kinds = [layer.kind for layer in layers]
    kinds = [all_kinds.index(kind) for kind in all_kinds]
    outputs: dict[int, LayerOutput] = {}

    def run_layer(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer = layers[index]
        with bound_state(layer.bindings, [*layer.named_state.values()], inputs.step):
            output = layer.module.forward(*args, **kwargs)
        has_items = isinstance(output, tuple | list)
        dtype = dtype_name((output[0] if has_items else output).dtype)
        outputs[kinds[index]] = LayerOutput(len(output) if has_items else 0, dtype)
        if len(outputs) == len(set(kinds)):
            raise _AllKindsReturned
        return output

    given = step_tensors(inputs)
    try:
        with replace_layers(layers, run_layer), fake_tensors():
            ids = torch.empty_like(given["input_ids"])  # fake, because transformers searches real ids for padding
            model(input_ids=ids, position_ids=given["position_ids"], use_cache=False)
    except _AllKindsReturned:
        pass
    except Exception:  # the export runs the same code, and reports what fails
        log.info("what layers return is not known: the model failed on fake tensors", exc_info=True)
    return [outputs.get(kind, LayerOutput()) for kind in kinds]


@contextlib.contextmanager
def replace_layers(layers: Sequence[TracedLayer], replacement: Callable[..., Any]) -> Iterator[None]:
    """Within the block, a call of layer i is replacement(i, args, kwargs)."""
    previous = [get_compiled_call(layer.module) for layer in layers]

    def replaced(index: int) -> Callable[..., Any]:
        return lambda *args, **kwargs: replacement(index, args, kwargs)

    for index, layer in enumerate(layers):
        set_compiled_call(layer.module, replaced(index))
    try:
        yield
    finally:
        for layer, compiled_call in zip(layers, previous, strict=True):
            set_compiled_call(layer.module, compiled_call)


@contextlib.contextmanager
def bound_state(bindings: Sequence[LayerBinding], state: Sequence[Tensor], step: Step) -> Iterator[None]:
    """Within the block, the layer reads `state` and `step`."""
    previous = [(binding.state, binding.step_holder.step) for binding in bindings]
    remaining = iter(state)
    for binding in bindings:
        binding.state = tuple(itertools.islice(remaining, len(binding.state)))
        binding.step_holder.step = step
    try:
        yield
    finally:
        for binding, (tensors, earlier_step) in zip(bindings, previous, strict=True):
            binding.state, binding.step_holder.step = tensors, earlier_step
