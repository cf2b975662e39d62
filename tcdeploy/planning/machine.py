"""Decides the device and the dtypes, and warns about what the installed packages lack. Does not import torch."""

from __future__ import annotations

from tcdeploy.errors import UsageError
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.backends import HALF_DTYPES
from tcdeploy.planning.decision import Decision, DTypes, PlanInputs
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.recipe import Device, DType, Recipe
from tcdeploy.planning.tested_versions import describe_ranges, describe_versions, untested_packages


def warn_about_packages(environment: Environment) -> list[Decision]:
    """A warning for versions that were not tested, and one for each private name that the packages lack."""
    return [*_untested_versions(environment), *_missing_internals(environment)]


def _untested_versions(environment: Environment) -> list[Decision]:
    """One warning for all packages whose version is outside the tested range."""
    versions = {"torch": environment.torch, "triton": environment.triton, "transformers": environment.transformers}
    untested = untested_packages(versions)
    if not untested:
        return []
    reason = f"tested with {describe_ranges(untested)}"
    return [Decision("versions", describe_versions(untested, versions), reason, is_fallback=True)]


def _missing_internals(environment: Environment) -> list[Decision]:
    """A warning for each private name of torch, Triton, transformers or uvicorn that these versions lack."""
    return [
        Decision(name, "not available", consequence, is_fallback=True)
        for name, consequence in environment.missing_internals
    ]


def decide_inputs(
    recipe: Recipe, environment: Environment, architecture: Architecture, decisions: list[Decision]
) -> PlanInputs:
    """Decide the device and the dtypes, on which all other decisions depend."""
    if architecture.is_multimodal:
        reason = f"{architecture.model_type} is multimodal; image, audio and video inputs are rejected"
        decisions.append(Decision("inputs", "text only", reason))
    device = _decide_device(recipe, environment, decisions)
    dtypes = _decide_dtypes(recipe, architecture, device, decisions)
    if architecture.quantisation:
        method = f"{architecture.quantisation} dequantised to {dtypes.weight}"
        decisions.append(Decision("weights", method, "GEMMs with quantised weights are not supported yet"))
    return PlanInputs(recipe, environment, architecture, device, dtypes)


def _decide_device(recipe: Recipe, environment: Environment, decisions: list[Decision]) -> Device:
    if recipe.device == "cuda" and not environment.gpus:
        raise UsageError(
            "device cuda was requested, but torch sees no GPU", "remove --device cuda, or pass --device cpu"
        )
    if recipe.device:
        reason = "requested"
    elif environment.gpus:
        reason = f"{environment.gpu} is present"
    else:
        reason = "torch sees no GPU"
    device: Device = recipe.device or ("cuda" if environment.gpus else "cpu")
    if device == "cuda" and len(environment.gpus) > 1:
        reason += f"; GPU 0 of {environment.describe_gpus()}"
    decisions.append(Decision("device", device, reason))
    return device


def _decide_dtypes(recipe: Recipe, architecture: Architecture, device: Device, decisions: list[Decision]) -> DTypes:
    """One dtype for weights, KV and computation: nothing quantises yet. Printed as one line while they are equal."""
    dtype, reason = _decide_dtype(recipe, architecture, device)
    dtypes = DTypes(weight=dtype, kv=dtype, compute=dtype)
    if len(set(dtypes)) == 1:
        decisions.append(Decision("dtype", dtype, reason))
    else:
        decisions += [Decision(f"{name} dtype", value, reason) for name, value in dtypes._asdict().items()]
    return dtypes


def _decide_dtype(recipe: Recipe, architecture: Architecture, device: Device) -> tuple[DType, str]:
    if recipe.dtype:
        return recipe.dtype, "requested"
    if device == "cpu":
        return "float32", "default on a CPU; generates the same text as transformers"
    for half_dtype in HALF_DTYPES:
        if half_dtype == architecture.dtype:
            return half_dtype, "the checkpoint's dtype"
    stored = f"the checkpoint is {architecture.dtype}" if architecture.dtype else "the checkpoint's dtype is unknown"
    return "bfloat16", f"{stored}; bfloat16 halves the bytes read per token"
