"""The inputs that planning decisions share, and the record of a decision. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.recipe import Device, DType, Recipe

T = TypeVar("T")


@dataclass(frozen=True)
class Decision:
    """One line of the printed Plan. `is_fallback` marks a choice worse than usual; it is shown as a warning."""

    name: str
    value: str
    reason: str
    is_fallback: bool = False


class Decisions(list[Decision]):
    """The decisions so far, in the order in which they are printed."""

    def add(self, name: str, value: T, reason: str, is_fallback: bool = False) -> T:
        """Record a decision. Returns its value."""
        self.append(Decision(name, str(value), reason, is_fallback))
        return value


class DTypes(NamedTuple):
    """The dtypes of weights in device memory, of the KV cache, and of activations and logits."""

    weight: DType
    kv: DType
    compute: DType


@dataclass(frozen=True)
class PlanInputs:
    """What decisions read: the request, the machine and the model, with the device and dtypes already decided."""

    recipe: Recipe
    environment: Environment
    architecture: Architecture
    device: Device
    dtypes: DTypes
