"""Which attention backends this machine and this model allow: every no is a value with its reason.

The table of checks takes the machine as an argument, so any machine is testable on any other. Speed does not appear
here: what may run is a fact, what is best is `plan.py`'s decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.environment import FLASH_PACKAGES, TORCH_FLASH, Environment
from tcdeploy.planning.recipe import Attention


@dataclass(frozen=True)
class Supported:
    backend: Attention


@dataclass(frozen=True)
class Unsupported:
    backend: Attention
    reason: str


BackendSupport = Supported | Unsupported

MAX_HEAD_DIM = {"triton": 256, "torch-flash": 256, "flash-attn-2": 256, "flash-attn-3": 256, "flash-attn-4": 128}
FLASH_CAPABILITIES = {  # compute capabilities (major) that the kernels are built for
    "torch-flash": range(8, 100),
    "flash-attn-2": range(8, 100),
    "flash-attn-3": range(9, 10),
    "flash-attn-4": range(9, 12),
}
BACKENDS_WITHOUT_SOFTCAP = {"torch-flash"}


def check_backend(
    backend: Attention, environment: Environment, architecture: Architecture, device: str, dtype: str
) -> BackendSupport:
    """The first reason why `backend` cannot serve prefill here, or Accepted."""
    if backend == "reference":
        return Supported(backend)
    for reason in _unsupported_reasons(backend, environment, architecture, device, dtype):
        return Unsupported(backend, reason)
    return Supported(backend)


def _unsupported_reasons(
    backend: Attention, environment: Environment, architecture: Architecture, device: str, dtype: str
) -> Iterable[str]:
    if device != "cuda":
        yield "it needs a GPU"
    if backend == "triton":
        if not environment.triton:
            yield "triton is not installed"
        yield from _head_dim_reasons(backend, architecture)
        return
    if backend in FLASH_PACKAGES and backend not in dict(environment.flash_packages):
        yield f"{FLASH_PACKAGES[backend][1]} is not installed"
    if environment.gpu_capability[0] not in FLASH_CAPABILITIES[backend]:
        yield f"its kernels are not built for compute capability {environment.gpu_capability}"
    if backend == "torch-flash" and TORCH_FLASH in dict(environment.missing_internals):
        yield dict(environment.missing_internals)[TORCH_FLASH]
    if dtype == "float32":
        yield "it computes in bfloat16 and float16 only"
    yield from _head_dim_reasons(backend, architecture)
    for attention in architecture.attention_layers:
        if attention.v_head_dim != attention.head_dim:
            yield f"keys have head_dim {attention.head_dim} and values {attention.v_head_dim}"
        if attention.softcap and backend in BACKENDS_WITHOUT_SOFTCAP:
            yield "it has no logit soft-capping, which this model needs"


def _head_dim_reasons(backend: Attention, architecture: Architecture) -> Iterable[str]:
    limit = MAX_HEAD_DIM[backend]
    for head_dim in sorted({dim for spec in architecture.attention_layers for dim in (spec.head_dim, spec.v_head_dim)}):
        if head_dim > limit or head_dim % 8:
            yield f"head_dim {head_dim} is not a multiple of 8 up to {limit}"
