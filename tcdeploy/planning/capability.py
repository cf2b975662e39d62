"""Checks whether an attention backend can run on a machine with a model. Does not import torch.

The machine is an argument, so a test on a laptop can check an H100. Only hard requirements are checked here;
preferences are the order of the table in backends.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.backends import BACKENDS, Backend
from tcdeploy.planning.decision import PlanInputs
from tcdeploy.planning.recipe import Attention


def why_unsupported(name: Attention, inputs: PlanInputs) -> str:
    """The first reason why a backend cannot run: machine first, then dtype, then model. "" if it can."""
    return next(_reasons(BACKENDS[name], inputs), "")


def _reasons(backend: Backend, inputs: PlanInputs) -> Iterator[str]:
    if backend.requires_gpu:
        yield from _gpu_reasons(backend, inputs)
    if inputs.dtypes.compute not in backend.dtypes:
        yield f"it supports only {' and '.join(backend.dtypes)}"
    yield from _model_reasons(backend, inputs.architecture)


def _gpu_reasons(backend: Backend, inputs: PlanInputs) -> Iterator[str]:
    environment = inputs.environment
    if inputs.device != "cuda":
        yield "it requires a GPU"
    if backend.uses_triton and not environment.triton:
        yield "triton is not installed"
    if backend.module and backend.name not in dict(environment.flash_packages):
        yield f"{backend.distribution} is not installed"
    if backend.internal in dict(environment.missing_internals):
        yield dict(environment.missing_internals)[backend.internal]
    major, minor = environment.gpu_capability
    if backend.capability_majors is not None and major not in backend.capability_majors:
        yield f"it has no kernels for compute capability {major}.{minor}"


def _model_reasons(backend: Backend, architecture: Architecture) -> Iterator[str]:
    limit, multiple = backend.max_head_dim, backend.head_dim_multiple
    for head_dim in sorted({dim for spec in architecture.attention_layers for dim in (spec.head_dim, spec.v_head_dim)}):
        if (limit is not None and head_dim > limit) or head_dim % multiple:
            yield f"head_dim {head_dim} is not a multiple of {multiple} up to {limit}"
    for spec in architecture.attention_layers:
        if backend.requires_equal_head_dims and spec.v_head_dim != spec.head_dim:
            yield f"keys have head_dim {spec.head_dim} and values {spec.v_head_dim}; it requires them equal"
        if spec.softcap and not backend.supports_softcap:
            yield "it does not support logit soft-capping, which this model uses"
