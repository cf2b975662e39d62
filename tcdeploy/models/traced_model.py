"""A model whose weights have not been read: its modules, and where each of its tensors is in the checkpoint.

Every start makes it before any weight is read. transformers loads the model with tensors that only record how elements
move (convert/traced_tensor.py), and `pack_linears` packs them, so the recorded sources are those of the packed model.
Threads then read the files straight to the device (weights/sources.py), in one copy, while the start goes on.

transformers has to load the weights of the models that `WeightNotInCheckpointError` names. The plan says so.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from tcdeploy.errors import TcdeployError
from tcdeploy.models.auto_classes import model_class
from tcdeploy.models.convert.convert_model import convert_model
from tcdeploy.models.convert.quantisation import dequantised_tensors, is_dequantised
from tcdeploy.models.convert.traced_tensor import Trace, TracedTensor
from tcdeploy.models.load import quiet_transformers
from tcdeploy.models.load_errors import CONVERSION, first_line
from tcdeploy.models.pretrained import model_of_tensors
from tcdeploy.models.weights.checkpoint import DTYPES
from tcdeploy.models.weights.files import Checkpoint
from tcdeploy.models.weights.reader import ReadTotal, StoredTensor, stored_tensors
from tcdeploy.models.weights.sources import (
    Source,
    WeightNotInCheckpointError,
    WeightSource,
    dtype_name,
    loading_weights,
    stored_names,
)
from tcdeploy.models.weights.tensor_names import conversion_error
from tcdeploy.planning.plan import Plan
from tcdeploy.torch_compat.tensors_without_storage import supported as can_trace


class LoadingModel(NamedTuple):
    """total: of our reader threads; None if transformers has loaded the model, or if its weights are random."""

    model: PreTrainedModel
    total: ReadTotal | None = None


class TracedModel(NamedTuple):
    """model: its tensors from the checkpoint are TracedTensors, and the others are on the CPU."""

    model: PreTrainedModel
    checkpoint: Mapping[str, StoredTensor]

    @property
    def sources(self) -> dict[str, Source]:
        """Of the model's tensors in the checkpoint, by name. Those that are computed are left out."""
        return {name: tensor.source for name, tensor in _named_tensors(self.model)}

    @property
    def num_bytes(self) -> int:
        """Of the tensors from the checkpoint, once they are read."""
        tensors = {id(tensor): tensor for _, tensor in _named_tensors(self.model)}
        return sum(tensor.nbytes for tensor in tensors.values())

    @contextlib.contextmanager
    def loading(self, device: str) -> Iterator[LoadingModel]:
        """A copy of the model on `device`, whose weights are read while the block runs. As `loading_weights`."""
        names: dict[int, str] = {}
        sources: dict[str, WeightSource] = {}
        for name, tensor in _named_tensors(self.model):
            first = names.setdefault(id(tensor), name)
            source: Source = tensor.source if first == name else ["same", first]
            sources[name] = WeightSource(dtype_name(tensor.dtype), tuple(tensor.shape), source)
        with loading_weights(sources, self.checkpoint, device) as loading:
            tensors = dict(_named_tensors(self.model))
            replacements = {
                address: _like(tensors[name], loading.tensors[name]) for address, name in names.items()
            }  # by id, as copy.deepcopy expects
            model = copy.deepcopy(self.model, replacements)
            model.to(device)  # the computed tensors
            yield LoadingModel(model, loading.total)


def trace_model(
    plan: Plan, config: PreTrainedConfig, checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]],
    attn_implementation: str, packed_linears: tuple[tuple[str, ...], ...] = (),
) -> TracedModel:  # fmt: skip
    """Load the model of a checkpoint without its values. Also compares the names and shapes of all tensors.

    `shapes`: of the tensors in the model's state dict, by name. Raises ModelError if tensors are missing, unknown or
    have another shape, and WeightNotInCheckpointError if transformers must load the model.
    """
    if not can_trace():
        raise WeightNotInCheckpointError(f"its weights cannot be traced with torch {torch.__version__}")
    if model_class(config, plan.trust_remote_code) is None:
        raise WeightNotInCheckpointError("its code is not part of transformers")
    config, headers, stored = copy.deepcopy(config), checkpoint.tensors, stored_tensors(checkpoint.paths)
    if is_dequantised(config):
        del config.quantization_config
        headers = dequantised_tensors(headers)
    nowhere = {
        name: StoredTensor("", DTYPES.get(header.dtype, torch.float32), header.shape, 0, 0)
        for name, header in headers.items()
        if name not in stored
    }
    trace = Trace({name: nowhere.get(name) or stored[name] for name in headers})
    try:
        with quiet_transformers(), torch.no_grad():
            model = model_of_tensors(plan, config, attn_implementation, trace.tensors())
            convert_model(model, packed_linears)
    except TcdeployError:
        raise
    except Exception as error:  # transformers raises many types
        if CONVERSION in str(error) and not trace.problem:
            raise conversion_error(plan.model, headers, dict(shapes)) from error
        raise WeightNotInCheckpointError(trace.problem or first_line(error)) from error
    traced = TracedModel(model, trace.checkpoint)
    converted = [name for source in traced.sources.values() for name in stored_names(source) if name in nowhere]
    if converted:
        raise WeightNotInCheckpointError(f"{converted[0]} is stored in a format that is converted")
    return traced


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, TracedTensor]]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return ((name, tensor) for name, tensor in named if isinstance(tensor, TracedTensor))


def _like(tensor: TracedTensor, values: Tensor) -> Tensor:
    """`values` as a parameter or buffer, as `tensor` is."""
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values
