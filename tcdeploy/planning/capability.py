"""Which attention backends this machine and this model allow: every no is a value with its reason.

The table of checks takes the machine as an argument, so any machine is testable on any other. Speed does not appear
here: what may run is a fact, what is best is `plan.py`'s decision.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.environment import FLASH_PACKAGES, Environment
from tcdeploy.planning.recipe import Attention


@dataclass(frozen=True)
class Accepted:
    backend: Attention


@dataclass(frozen=True)
class Rejected:
    backend: Attention
    reason: str


Verdict = Accepted | Rejected

HEAD_DIM_LIMIT = {"triton": 256, "torch-flash": 256, "flash-attn-2": 256, "flash-attn-3": 256, "flash-attn-4": 128}
FLASH_CAPABILITIES = {  # compute capabilities (major) that the kernels are built for
    "torch-flash": range(8, 100),
    "flash-attn-2": range(8, 100),
    "flash-attn-3": range(9, 10),
    "flash-attn-4": range(9, 12),
}
WITHOUT_SOFTCAP = {"torch-flash"}


def judge_backend(
    backend: Attention, environment: Environment, architecture: Architecture, device: str, dtype: str
) -> Verdict:
    """The first reason why `backend` cannot serve prefill here, or Accepted."""
    if backend == "reference":
        return Accepted(backend)
    for reason in _objections(backend, environment, architecture, device, dtype):
        return Rejected(backend, reason)
    return Accepted(backend)


def _objections(
    backend: Attention, environment: Environment, architecture: Architecture, device: str, dtype: str
) -> Iterable[str]:
    if device != "cuda":
        yield "it needs a GPU"
    if backend == "triton":
        if not environment.triton:
            yield "triton is not installed"
        yield from _head_dim_objections(backend, architecture)
        return
    if backend in FLASH_PACKAGES and backend not in dict(environment.flash_packages):
        yield f"{FLASH_PACKAGES[backend][1]} is not installed"
    if environment.gpu_capability[0] not in FLASH_CAPABILITIES[backend]:
        yield f"its kernels are not built for compute capability {environment.gpu_capability}"
    if dtype == "float32":
        yield "it computes in bfloat16 and float16 only"
    yield from _head_dim_objections(backend, architecture)
    for attention in architecture.attentions:
        if attention.v_head_dim != attention.head_dim:
            yield f"keys have head_dim {attention.head_dim} and values {attention.v_head_dim}"
        if attention.softcap and backend in WITHOUT_SOFTCAP:
            yield "it has no logit soft-capping, which this model needs"


def _head_dim_objections(backend: Attention, architecture: Architecture) -> Iterable[str]:
    limit = HEAD_DIM_LIMIT[backend]
    for head_dim in sorted({dim for facts in architecture.attentions for dim in (facts.head_dim, facts.v_head_dim)}):
        if head_dim > limit or head_dim % 8:
            yield f"head_dim {head_dim} is not a multiple of 8 up to {limit}"
