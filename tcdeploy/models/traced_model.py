"""Builds a model without reading its weights, and records where each of its tensors is in the checkpoint.

A start with the model's code does this while it plans. transformers loads the model with tensors that only record how
elements move (convert/traced_tensor.py), and `pack_linears` packs them, so the recorded sources are those of the packed
model. Threads then read the files straight to their places on the device (weights/sources.py), while the start goes on.

If the weights cannot be traced, `trace_model` raises NotTraceableError, transformers loads them, and the plan has a
line `loading` with the reason.
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
from tcdeploy.models.convert.quantise_model import quantise_model
from tcdeploy.models.convert.quantised_weights import InsertedWeights, insert_quantised_weights
from tcdeploy.models.convert.traced_tensor import Trace, TracedTensor, quantise_traced
from tcdeploy.models.formats.methods import requested_scheme_finder, without_settings
from tcdeploy.models.load import quiet_transformers
from tcdeploy.models.load_errors import CONVERSION, first_line
from tcdeploy.models.pretrained import LoadSettings, model_of_tensors
from tcdeploy.models.weights.checkpoint import DTYPES
from tcdeploy.models.weights.files import Checkpoint
from tcdeploy.models.weights.reader import ReadTotal, StoredTensor, stored_tensors
from tcdeploy.models.weights.sources import (
    Source,
    WeightSource,
    loading_weights,
    stored_names,
)
from tcdeploy.models.weights.tensor_names import conversion_error
from tcdeploy.planning.dtypes import dtype_name
from tcdeploy.torch_compat.tensors_without_storage import supported as can_trace
from tcdeploy.torch_compat.transformers.initialization import skipping_loaded_modules


class NotTraceableError(Exception):
    """Why transformers must load the weights of a model."""


class LoadingModel(NamedTuple):
    """total: of the reader threads; complete after the block of `loading`."""

    model: PreTrainedModel
    total: ReadTotal


class TracedModel(NamedTuple):
    """model: its tensors from the checkpoint are TracedTensors, and the others are on the CPU."""

    model: PreTrainedModel
    checkpoint: Mapping[str, StoredTensor]
    inserted: InsertedWeights  # those that are quantised in the checkpoint, or while it is read

    @property
    def sources(self) -> dict[str, Source]:
        """Of each tensor that comes from the checkpoint, by its name in the model; computed ones have none."""
        return {name: tensor.source for name, tensor in _named_tensors(self.model)}

    @property
    def num_bytes(self) -> int:
        """Bytes of these tensors in the dtypes of the model; tied ones count once."""
        tensors = {id(tensor): tensor for _, tensor in _named_tensors(self.model)}
        return sum(tensor.nbytes for tensor in tensors.values())

    @contextlib.contextmanager
    def loading(self, device: str) -> Iterator[LoadingModel]:
        """A copy of the model on `device`. Threads read its weights during the block; they are complete after it.

        Raises as `loading_weights`.
        """
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
    plan: LoadSettings, config: PreTrainedConfig, checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]],
    attn_implementation: str, packed_linears: tuple[tuple[str, ...], ...],
) -> TracedModel:  # fmt: skip
    """Let transformers load the model with traced tensors, which also compares the names and shapes of all tensors.

    `shapes`: of the tensors in the model's state dict, by name, for the message of a conversion that fails. Raises
    ModelError if tensors are missing, unknown or have another shape, and NotTraceableError if transformers must load
    the model.
    """
    if not can_trace():
        raise NotTraceableError(f"its weights cannot be traced with torch {torch.__version__}")
    if model_class(config, plan.trust_remote_code) is None:
        raise NotTraceableError("its code is not part of transformers")
    headers, quantised, stored = checkpoint.tensors, checkpoint.quantised, stored_tensors(checkpoint.paths)
    stand_ins = {
        name: StoredTensor("", DTYPES.get(header.dtype, torch.float32), header.shape, 0, 0)
        for name, header in headers.items()
        if name not in stored or name in quantised
    }
    trace = Trace({name: stand_ins.get(name) or stored[name] for name in headers})
    try:
        with quiet_transformers(), torch.no_grad(), skipping_loaded_modules():
            model = model_of_tensors(plan, without_settings(config), attn_implementation, trace.tensors())
            inserted = insert_quantised_weights(model, quantised, Trace(stored))
            inserted.schemes.update(quantise_model(model, requested_scheme_finder(config), quantise_traced))
            convert_model(model, packed_linears)
            copy.deepcopy(model, {id(tensor): tensor for _, tensor in _named_tensors(model)})  # as `loading` copies it
    except TcdeployError:
        raise
    except Exception as error:  # transformers raises many types
        if CONVERSION in str(error) and not trace.problem:
            raise conversion_error(plan.model, headers, dict(shapes)) from error
        raise NotTraceableError(trace.problem or first_line(error)) from error
    traced = TracedModel(model, stored, inserted)
    used = {name for source in traced.sources.values() for name in stored_names(source)}
    if unreadable := sorted(used - stored.keys()):
        raise NotTraceableError(f"{unreadable[0]} has the dtype {headers[unreadable[0]].dtype}")
    return traced


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, TracedTensor]]:
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return ((name, tensor) for name, tensor in named if isinstance(tensor, TracedTensor))


def _like(tensor: TracedTensor, values: Tensor) -> Tensor:
    """`values` as a parameter or buffer, as `tensor` is."""
    return nn.Parameter(values, requires_grad=False) if isinstance(tensor, nn.Parameter) else values
