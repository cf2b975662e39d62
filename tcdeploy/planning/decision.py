"""The record of a decision, and the first ones, which all others share: device and dtypes. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from tcdeploy.errors import UsageError
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.backends import FP8_KV, HALF_DTYPES
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.recipe import Device, DType, KVDType, Recipe
from tcdeploy.planning.tested_versions import tested_range, untested_packages

T = TypeVar("T")
FP8_CAPABILITY = (8, 9)  # of the oldest GPUs that convert FP8 in hardware; Triton supports no others


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
    """The dtypes of dense weights in device memory, of the KV cache, and of activations and logits."""

    weight: DType
    kv: KVDType
    compute: DType


@dataclass(frozen=True)
class PlanInputs:
    """What decisions read: the request, the machine and the model, with the device and dtypes already decided."""

    recipe: Recipe
    environment: Environment
    architecture: Architecture
    device: Device
    dtypes: DTypes


def warn_about_packages(environment: Environment, decisions: Decisions) -> None:
    """A warning for all untested versions, and one for each private name that the packages lack."""
    versions = {"torch": environment.torch, "triton": environment.triton, "transformers": environment.transformers}
    if untested := untested_packages(versions):
        value = ", ".join(f"{package} {versions[package]}" for package in untested)
        ranges = ", ".join(f"{package} {tested_range(package)}" for package in untested)
        decisions.add("versions", value, f"tested with {ranges}", is_fallback=True)
    for name, consequence in environment.missing_internals:
        decisions.add(name, "not available", consequence, is_fallback=True)


def decide_inputs(
    recipe: Recipe, environment: Environment, architecture: Architecture, decisions: Decisions
) -> PlanInputs:
    """Decide the device and the dtypes, on which all other decisions depend."""
    if architecture.is_multimodal:
        reason = f"{architecture.model_type} is multimodal; image, audio and video inputs are rejected"
        decisions.add("inputs", "text only", reason)
    device = _decide_device(recipe, environment, decisions)
    dtype = _decide_dtype(recipe, architecture, device, decisions)
    kv_dtype = _decide_kv_dtype(recipe, environment, architecture, device, dtype, decisions)
    dtypes = DTypes(weight=dtype, kv=kv_dtype, compute=dtype)
    quantised = [f"{count} linear layers in {scheme}" for scheme, count in architecture.schemes.items()]
    quantised += [f"{count} stacks of experts in {scheme}" for scheme, count in architecture.expert_schemes.items()]
    if quantised:
        decisions.add(
            "weights", ", ".join(quantised), f"quantised with {architecture.quantisation}; others are {dtypes.weight}"
        )
    elif architecture.quantisation:
        reason = f"no linear layer of this checkpoint in {architecture.quantisation} has a scheme with kernels"
        decisions.add("weights", f"dense, in {dtypes.weight}", reason)
    return PlanInputs(recipe, environment, architecture, device, dtypes)


def _decide_device(recipe: Recipe, environment: Environment, decisions: Decisions) -> Device:
    if recipe.device == "cuda" and not environment.gpus:
        message = "device cuda was requested, but torch sees no GPU"
        raise UsageError(message, "remove --device cuda, or pass --device cpu")
    reason = f"the GPU is {environment.gpu}" if environment.gpus else "torch sees no GPU"
    if recipe.device:
        reason = "requested"
    device: Device = recipe.device or ("cuda" if environment.gpus else "cpu")
    if device == "cuda" and len(environment.gpus) > 1:
        reason += f"; GPU 0 of {environment.describe_gpus()}"
    return decisions.add("device", device, reason)


def _decide_dtype(recipe: Recipe, architecture: Architecture, device: Device, decisions: Decisions) -> DType:
    """One dtype for dense weights and computation, and by default for K and V. Quantised weights keep theirs."""
    stored = architecture.dtype
    default: DType = "float32" if device == "cpu" else "float16" if stored == "float16" else "bfloat16"
    dtype = recipe.dtype or default
    if recipe.dtype:
        reason = "requested"
    elif device == "cpu":
        reason = "default on a CPU; generates the same text as transformers"
    elif stored in HALF_DTYPES:
        reason = "the checkpoint's dtype"
    else:
        described = f"the checkpoint is {stored}" if stored else "the checkpoint's dtype is unknown"
        reason = f"{described}; bfloat16 halves the bytes read per token"
    return decisions.add("dtype", dtype, reason)


def _decide_kv_dtype(
    recipe: Recipe, environment: Environment, architecture: Architecture, device: Device, dtype: DType,
    decisions: Decisions,
) -> KVDType:  # fmt: skip
    """The dtype of K and V in the cache. Raises UsageError if FP8 was requested and cannot be used."""
    if recipe.kv_dtype == "auto":
        return dtype
    problem = ""
    if not architecture.attention_layers:
        problem = f"no layer of {architecture.model_type} keeps K and V"
    elif device == "cuda" and environment.gpu_capability < FP8_CAPABILITY:
        (major, minor), oldest = environment.gpu_capability, ".".join(map(str, FP8_CAPABILITY))
        problem = f"{environment.gpu} has compute capability {major}.{minor}, and FP8 requires {oldest} or later"
    if problem:
        raise UsageError(f"--kv-dtype {recipe.kv_dtype} cannot be used: {problem}", "omit --kv-dtype")
    share = "a quarter" if dtype == "float32" else "half"
    return decisions.add("KV dtype", FP8_KV, f"requested; K and V take {share} of their memory in {dtype}")
