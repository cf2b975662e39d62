"""Finds the modules whose state a mechanism keeps in slots, while the model runs on tensors without data.

A mechanism (kernels/state/mechanism.py) recognises its modules and describes what they keep. During the probe's pass
each of them runs as it will run in a step, with the mechanism's op on fake tensors, so the probe sees the projections
that it calls, and whether it uses positions of its own.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection
from typing import Any, Protocol

from torch import nn

from tcdeploy.models.positions import PositionTracer
from tcdeploy.planning.architecture import SlotState, StateTensor
from tcdeploy.torch_compat.dynamo.mark_dynamic import tensors_in


class ProbedMechanism(Protocol):
    """What the probe uses of `Mechanism` in kernels/state/mechanism.py, which this folder may not import."""

    @property
    def name(self) -> str: ...
    @property
    def layer_types(self) -> frozenset[str]: ...
    def claims(self, module: nn.Module) -> bool: ...
    def state(self, module: nn.Module) -> tuple[StateTensor, ...]: ...
    def trace(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any: ...


class SlotRecorder:
    """Runs claimed modules by their mechanism, and records their calls by module."""

    def __init__(self, mechanisms: Collection[ProbedMechanism], positions: PositionTracer) -> None:
        self._mechanisms, self._positions = mechanisms, positions
        self.states: dict[int, SlotState] = {}  # by id of the module, without paths
        self.calls: Counter[int] = Counter()  # by id of the module

    @property
    def layer_types(self) -> frozenset[str]:
        """Entries of `layer_types` in configs that a mechanism serves."""
        return frozenset[str]().union(*(mechanism.layer_types for mechanism in self._mechanisms))

    def install(self, model: nn.Module) -> None:
        """Make the claimed modules of `model` run by their mechanism, until `remove`."""
        for module in model.modules():
            for mechanism in self._mechanisms:
                if mechanism.claims(module):
                    assert id(module) not in self.states, f"several mechanisms claim {type(module).__name__}"
                    self.states[id(module)] = SlotState("", mechanism.name, mechanism.state(module))
                    module.forward = functools.partial(self._run, module, mechanism)

    def remove(self, model: nn.Module) -> None:
        for module in model.modules():
            if id(module) in self.states:
                del module.forward

    def _run(self, module: nn.Module, mechanism: ProbedMechanism, *args: Any, **kwargs: Any) -> Any:
        self.calls[id(module)] += 1
        output = mechanism.trace(module, *args, **kwargs)
        self._positions.check(*tensors_in(output))
        return output
