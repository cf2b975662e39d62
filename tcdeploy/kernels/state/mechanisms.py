"""The known mechanisms by name, and how a model's modules get their state.

In a step, a module that a mechanism has claimed runs `Mechanism.forward`; without one, as in the reference of the
parity check, it runs its own forward. A start from packages imports this module, so that the ops of all mechanisms are
registered.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

from torch import nn

from tcdeploy.kernels.attention.metadata import StepHolder
from tcdeploy.kernels.state.gated_delta_net import GatedDeltaNetMechanism
from tcdeploy.kernels.state.kimi_delta import KimiDeltaMechanism
from tcdeploy.kernels.state.layer_state import LayerBinding, StateTensors
from tcdeploy.kernels.state.lightning import LightningMechanism
from tcdeploy.kernels.state.mamba2_mixer import Mamba2Mechanism
from tcdeploy.kernels.state.mamba_mixer import MambaMechanism
from tcdeploy.kernels.state.mechanism import Mechanism
from tcdeploy.kernels.state.short_conv import ShortConvMechanism
from tcdeploy.planning.architecture import Architecture, SlotState

MECHANISMS: dict[str, Mechanism] = {
    mechanism.name: mechanism
    for mechanism in (
        GatedDeltaNetMechanism(),
        KimiDeltaMechanism(),
        LightningMechanism(),
        Mamba2Mechanism(),
        MambaMechanism(),
        ShortConvMechanism(),
    )  # fmt: skip
}


def bind_state(
    model: nn.Module, architecture: Architecture, tensors: Sequence[StateTensors], step_holder: StepHolder
) -> None:
    """Attach its state and the step holder to the module that each LayerState names."""
    for state, of_layer in zip(architecture.layer_states, tensors, strict=True):
        module: Any = model.get_submodule(state.path)
        module.tcdeploy = LayerBinding(of_layer, step_holder)
        if isinstance(state, SlotState):
            module.tcdeploy.mechanism = MECHANISMS[state.mechanism]
            # A method of the instance, not a closure: torch.compile would make a program for each layer's closure.
            module.forward = types.MethodType(_forward, module)


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    binding: LayerBinding = module.tcdeploy
    step = binding.step_holder.step
    if step is None:
        return type(module).forward(module, *args, **kwargs)
    assert binding.mechanism is not None
    return binding.mechanism.forward(module, binding.state, step.attention_metadata, *args, **kwargs)
