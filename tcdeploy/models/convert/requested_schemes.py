"""Chooses the linear layers and stacked experts that `--quantize` quantises, and their schemes.

They are those of the decoder layers, because each step reads their bytes. The head and the embedding stay dense, since
their rounding errors reach the logits undamped, and so do the encoders of images and sound, which are not run. Routers
stay dense, since a small error makes them choose another expert. Experts stay dense if their class does not support
transformers' interface for them (scheme_experts.py).

The result becomes the config's quantization settings (`explicit_settings`), like those of a checkpoint that was
quantised before. So the probe, random weights and compile workers do not know that it was requested.

Rejected: one scheme with scales in the dtype of the plan. The same checkpoint would then be quantised to other values
with another --dtype, and to others than those that `tcdeploy quantize` writes.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedConfig

from tcdeploy.errors import UsageError
from tcdeploy.models.attention_calls import decoder_layer_position
from tcdeploy.models.convert.scheme_experts import stacked_weights
from tcdeploy.models.formats.layer_names import is_listed
from tcdeploy.models.formats.methods import explicit_settings
from tcdeploy.models.formats.quantised_weight import LayerScheme
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.decision import Decision
from tcdeploy.planning.quantize_request import QuantizeRequest
from tcdeploy.planning.schemes import int4_scheme_name

# Modules whose output chooses or weights experts, by a part of their path: model.layers.3.mlp.gate, for example.
ROUTER = re.compile(r"(^|\.)(gate|router|router_gate|shared_expert_gate)(\.|$)")
IS_ROUTER, IS_SKIPPED = "routers of experts", "requested to stay dense"


class RequestedSchemes(NamedTuple):
    """schemes: by path. dense: the other linear layers and experts of decoder layers by path, with the reason."""

    schemes: dict[str, LayerScheme]
    dense: dict[str, str]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """A line of the plan for each reason."""
        counts = Counter(self.dense.values())
        return tuple(Decision("dense layers", f"{count}", reason) for reason, count in counts.items())


def request_schemes(
    model: nn.Module, architecture: Architecture, request: QuantizeRequest, skipped: Sequence[str]
) -> RequestedSchemes:
    """The schemes for the linear layers and stacked experts of a model. architecture.dtype: of the checkpoint.

    Raises UsageError if a name in `skipped` is of none of them, or if none is left.
    """
    scheme, schemes, dense = layer_scheme(request, architecture.dtype), dict[str, LayerScheme](), dict[str, str]()
    for path, columns in _layer_columns(model, architecture).items():
        if ROUTER.search(path):
            dense[path] = IS_ROUTER
        elif is_listed(path, skipped):
            dense[path] = IS_SKIPPED
        elif request.group_size and columns % request.group_size:
            dense[path] = f"groups of {request.group_size} do not divide their {columns} columns"
        else:
            schemes[path] = scheme
    for name in skipped:
        if not any(is_listed(path, (name,)) for path in (*schemes, *dense)):
            hint = f"a linear layer of this model is {next(iter((*schemes, *dense)), 'missing')}"
            raise UsageError(
                f"{name!r}, which was requested to stay dense, is no linear layer of a decoder layer", hint
            )
    if not schemes:
        reasons = "; ".join(dict.fromkeys(dense.values())) or "the decoder layers have none"
        raise UsageError(f"{request.text} quantises no linear layer of this model: {reasons}", "use fp8 or int8")
    return RequestedSchemes(schemes, dense)


def layer_scheme(request: QuantizeRequest, dtype: str) -> LayerScheme:
    """The scheme for weights of a checkpoint in this dtype."""
    match request.numbers:
        case "fp8":
            return LayerScheme("fp8_channel")
        case "int8":
            return LayerScheme("int8")
        case "int4":
            scales = "float16" if dtype == "float16" else "bfloat16"
            return LayerScheme(int4_scheme_name(scales, zeros=False, permuted=False), request.group_size)


def with_schemes(
    config: PreTrainedConfig, schemes: Mapping[str, LayerScheme], request: QuantizeRequest
) -> PreTrainedConfig:
    """A copy of the config of a dense checkpoint that states these schemes."""
    config = copy.deepcopy(config)
    config.quantization_config = explicit_settings(schemes, fp8_inputs=request.numbers == "fp8")
    return config


def _layer_columns(model: nn.Module, architecture: Architecture) -> dict[str, int]:
    """The columns of plain linear layers and of weights of stacked experts in the decoder layers, by path."""
    positions = [decoder_layer_position(model, state.path) for state in architecture.layer_states]
    layers = dict.fromkeys(f"{stack}.{index}" for stack, index in positions)
    columns: dict[str, int] = {}
    for path in layers:
        layer = model.get_submodule(path)
        for name, module in layer.named_modules():
            if type(module) is nn.Linear:
                columns[f"{path}.{name}"] = module.in_features
        columns |= {f"{path}.{stacked.path}": stacked.columns for stacked in stacked_weights(layer)}
    return columns
