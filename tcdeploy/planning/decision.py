"""The inputs that planning decisions share, and the record of a decision. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.recipe import Device, DType, Recipe


@dataclass(frozen=True)
class Decision:
    """One line of the printed Plan. `is_fallback` marks a choice worse than usual; it is shown as a warning."""

    name: str
    value: str
    reason: str
    is_fallback: bool = False


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
