"""Gives each attention module the scales of its K and V in an FP8 cache, as a buffer `kv_scales` [2] float32.

The cache holds K / kv_scales[0] and V / kv_scales[1] (kernels/attention/ops.py). Checkpoints whose K and V were
calibrated store one number each:

    self_attn.k_scale, self_attn.v_scale                  compressed-tensors
    self_attn.k_proj.k_scale, self_attn.v_proj.v_scale    TensorRT Model Optimizer
    self_attn.attn.k_scale, self_attn.attn.v_scale        as vLLM names them
    self_attn.kv_scale                                    one for both, in older checkpoints

Without them the scales are 1.0: K and V of most models are far below 448, the largest value of FP8.

The scales are a buffer because they then are weights like any other: programs and packages take them as inputs, so that
all layers share one program; start records say where they are in the checkpoint; and the digest of the weights, which
names a stored reference, covers them. Rejected: tensors of the layer's state, which a start zeroes, and numbers, which
would be constants of a program.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tcdeploy.errors import ModelError
from tcdeploy.models.convert.traced_tensor import Trace, TracedTensor
from tcdeploy.models.formats.layer_names import core_name
from tcdeploy.models.weights.files import Checkpoint
from tcdeploy.models.weights.reader import StoredTensor, read_tensor, stored_tensors
from tcdeploy.models.weights.sources import Source, evaluate
from tcdeploy.planning.architecture import Architecture

BUFFER = "kv_scales"
DUMMY_SCALES = (0.03, 0.05)  # for random weights: not 1, so that a scale that is left out changes the logits
SCALE = re.compile(r"(?P<path>.*?(?:attn|attention))\.(?:(?:[kv]_proj|qkv_proj|attn)\.)?(?P<kind>k|v|kv)_scale")
HINT = "use --kv-dtype auto, or a checkpoint whose KV cache was calibrated with one scale per layer"


class KVScales(NamedTuple):
    """names: of the tensors with k_scale and v_scale in the checkpoint, by path of the attention module."""

    names: dict[str, tuple[str, str]]
    tensors: Mapping[str, StoredTensor]


def find_kv_scales(model: str, architecture: Architecture, checkpoint: Checkpoint | None) -> KVScales:
    """The scales in a checkpoint. Modules without scales are left out.

    `checkpoint`: None if it has no safetensors files. Raises ModelError for a scale without its partner, of several
    numbers, or whose value is not positive and finite.
    """
    tensors = stored_tensors(checkpoint.paths) if checkpoint is not None else {}
    stored: dict[str, dict[str, str]] = defaultdict(dict)
    for name in tensors:
        if match := SCALE.fullmatch(name):
            stored[core_name(match["path"])][match["kind"]] = name
    found = KVScales({}, tensors)
    for state in architecture.attention_layers:
        if not (names := stored.get(core_name(state.path))):
            continue
        k, v = (names.get(kind, names.get("kv")) for kind in ("k", "v"))
        if k is None or v is None:
            present, missing = ("K", "V") if k else ("V", "K")
            raise ModelError(f"{model} has a scale of {present} ({k or v}), but none of {missing}", HINT)
        for name in (k, v):
            _check(model, name, tensors[name])
        found.names[state.path] = (k, v)
    return found


def _check(model: str, name: str, stored: StoredTensor) -> None:
    """Raises ModelError. Reads the value."""
    if math.prod(stored.shape) != 1:
        raise ModelError(f"{name} of {model} has the shape {[*stored.shape]}; one scale per layer is supported", HINT)
    value = read_tensor(stored).float().item()
    if not 0 < value < math.inf:
        raise ModelError(f"{name} of {model} is {value:g}; the scale of a KV cache must be positive", HINT)


def trace_kv_scales(model: nn.Module, architecture: Architecture, found: KVScales) -> None:
    """Register the scales of a traced model, which threads read with its weights (models/traced_model.py)."""
    trace = Trace(found.tensors)
    for state in architecture.attention_layers:
        scales = torch.ones(2)
        if names := found.names.get(state.path):
            scales = TracedTensor(_source(*names), torch.empty(2, device="meta"), trace)
        _register(model, state.path, scales)


def load_kv_scales(model: nn.Module, architecture: Architecture, found: KVScales) -> None:
    """Register the scales of a loaded model."""
    for state in architecture.attention_layers:
        names = found.names.get(state.path)
        scales = evaluate(_source(*names), found.tensors).float() if names else torch.ones(2)
        _register(model, state.path, scales.to(_device(model)))


def add_dummy_kv_scales(model: nn.Module, architecture: Architecture) -> None:
    """Register the scales of a model with random weights."""
    for state in architecture.attention_layers:
        _register(model, state.path, torch.tensor(DUMMY_SCALES, device=_device(model)))


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _register(model: nn.Module, path: str, scales: Tensor) -> None:
    model.get_submodule(path).register_buffer(BUFFER, scales)


def _source(k_name: str, v_name: str) -> Source:
    return ["cat", 0, [["reshape", [1], ["tensor", name]] for name in (k_name, v_name)]]
