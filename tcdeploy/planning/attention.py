"""Chooses the attention backends, the CUDA graphs that they allow, and mixed steps. Does not import torch.

`why_unsupported` checks only hard requirements of a backend; preferences are the order of the table in backends.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from tcdeploy.errors import UsageError
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.backends import BACKENDS, FP8_KV, Backend, Phase
from tcdeploy.planning.decision import Decisions, PlanInputs
from tcdeploy.planning.recipe import Attention, Graphs, Recipe

# Shorter prefill buckets are not tuned over backends: attention is too small a part of their step.
TUNED_ATTENTION_MIN_TOKENS = 4096
ITL_TARGET_DECODE_STEPS = 3  # default ITL target, in predicted times of a decode step of the same rows


def decide_prefill_attention(inputs: PlanInputs, decisions: Decisions) -> Attention:
    """The requested backend, or the first supported one. Raises UsageError if the requested one is unsupported."""
    requested = inputs.recipe.attention
    if requested is None:
        return _first_supported("prefill", inputs, decisions)
    if reason := why_unsupported(requested, inputs):
        message = f"attention {requested} cannot be used: {reason}"
        raise UsageError(message, "omit --attention to use the best supported backend")
    return decisions.add("prefill attention", requested, "requested")


def decide_decode_attention(inputs: PlanInputs, decisions: Decisions) -> Attention:
    """The requested backend if it serves decode, else the first supported one.

    The K and V of prefill are written by the decode backend's kernel too.
    """
    requested = inputs.recipe.attention
    if requested is not None and BACKENDS[requested].serves_decode:
        return decisions.add("decode attention", requested, "requested")
    return _first_supported("decode", inputs, decisions)


def decide_alternative_attention(inputs: PlanInputs, decisions: Decisions) -> tuple[Attention, ...]:
    """Backends that `--mode auto` may time in long prefill buckets; none if a backend was requested.

    They do not depend on the tuning time, so that a later start without it has the same plan key and its timings.
    """
    if inputs.recipe.mode != "auto" or inputs.recipe.attention:
        return ()
    candidates = (backend.name for backend in BACKENDS.values() if backend.selection == "tuned")
    tuned = tuple(name for name in candidates if not why_unsupported(name, inputs))
    if tuned:
        timed = "timed" if inputs.recipe.tune_seconds > 0 else "timed by --tune-seconds"
        reason = f"installed; {timed} in prefill buckets of at least {TUNED_ATTENTION_MIN_TOKENS} tokens"
        decisions.add("other attention", ",".join(tuned), reason)
    return tuned


def decide_graphs(inputs: PlanInputs, decode_attention: Attention, decisions: Decisions) -> Graphs:
    """How CUDA graphs are captured. Raises UsageError for a request that contradicts mode, shapes or attention."""
    recipe, requested = inputs.recipe, inputs.recipe.graphs
    is_requested = requested not in (None, "none")
    if requested == "region" and recipe.shapes == "dynamic":
        message = "--graphs region cannot be combined with --shapes dynamic: it would capture a graph for every length"
        raise UsageError(message, "--graphs step --shapes dynamic")
    if inputs.device == "cpu":
        return decisions.add("graphs", "none", "CUDA graphs require a GPU", is_fallback=is_requested)
    if not BACKENDS[decode_attention].is_capturable:
        if is_requested:
            message = f"graphs {requested} cannot capture {decode_attention} attention: it reads lengths on the host"
            raise UsageError(message, "--graphs none")
        return decisions.add("graphs", "none", f"{decode_attention} attention reads lengths on the host", True)
    if recipe.mode == "default":
        if is_requested:
            message = f"mode default does not use CUDA graphs, but graphs {requested} was requested"
            raise UsageError(message, f"--mode reduce-overhead --graphs {requested}")
        return decisions.add("graphs", "none", "mode default does not use CUDA graphs")
    if requested:
        return decisions.add("graphs", requested, "requested")
    reason = "one launch per step; per-region graphs took 2.4 times as long on an H100"
    return decisions.add("graphs", "step", reason)


def decide_mixed_steps(inputs: PlanInputs, graphs: Graphs, attention: Attention, decisions: Decisions) -> bool:
    """Whether running sequences decode in the steps in which prompts are computed.

    `attention`: of prefill. Raises UsageError if that is requested together with a CUDA graph per region, whose shapes
    would depend on the rows, and for a limit of prefill steps below 1.
    """
    requested, consecutive_prefills = inputs.recipe.mixed_steps, inputs.recipe.max_consecutive_prefills
    if consecutive_prefills < 1:
        message = f"max_consecutive_prefills is {consecutive_prefills}; it must be at least 1"
        raise UsageError(message, "--max-consecutive-prefills 4")
    if graphs == "region" and requested == "on":
        message = "--mixed-steps on cannot be combined with --graphs region: it would capture a graph for each number"
        raise UsageError(f"{message} of rows", "--mixed-steps on --graphs step")
    value, reason = "on", "sequences decode while prompts are computed"
    if graphs == "region":
        value, reason = "off", "one CUDA graph per region"
    elif requested:
        value, reason = requested, "requested"
    elif graphs == "step" and not BACKENDS[attention].is_capturable:
        value, reason = "off", "only decode steps are captured as CUDA graphs; mixed steps would decode without one"
    return decisions.add("mixed steps", value, reason) == "on"


def decide_itl_target(recipe: Recipe, mixed_steps: bool, decisions: Decisions) -> float | None:
    """Limit of a mixed step's predicted time in ms; None: ITL_TARGET_DECODE_STEPS decode steps of its rows.

    Raises UsageError if the requested target is not a positive, finite number.
    """
    target = recipe.itl_target
    if target is not None and not 0 < target < math.inf:
        raise UsageError(f"itl_target is {target}; it must be a positive number of milliseconds", "--itl-target 20")
    if target is not None:
        reason = "requested" if mixed_steps else "requested, but not used: steps are not mixed"
        decisions.add("ITL target", f"{target:g} ms", reason, is_fallback=not mixed_steps)
    elif mixed_steps:
        value = f"{ITL_TARGET_DECODE_STEPS} decode steps"
        decisions.add("ITL target", value, "default; of the same rows, predicted from timed steps")
    return target


def _first_supported(phase: Phase, inputs: PlanInputs, decisions: Decisions) -> Attention:
    """The first backend in the table that serves `phase` here. The reference backend supports every model."""
    rejections: list[str] = []
    for backend in BACKENDS.values():
        if backend.selection == "tuned" or not backend.reason(phase):
            continue
        if reason := why_unsupported(backend.name, inputs):
            rejections.append(f"not {backend.name}: {reason}")
            continue
        reason, is_fallback = "; ".join([backend.reason(phase), *rejections]), backend.selection == "fallback"
        if inputs.device == "cpu":
            reason, is_fallback = "the other backends require a GPU", False
        return decisions.add(f"{phase} attention", backend.name, reason, is_fallback)
    raise AssertionError(f"no row of the backend table serves {phase} on every machine")


def why_unsupported(name: Attention, inputs: PlanInputs) -> str:
    """The first reason why a backend cannot run: machine first, then dtype, then model. "" if it can."""
    return next(_reasons(BACKENDS[name], inputs), "")


def _reasons(backend: Backend, inputs: PlanInputs) -> Iterator[str]:
    if backend.requires_gpu:
        yield from _gpu_reasons(backend, inputs)
    if inputs.dtypes.compute not in backend.dtypes:
        yield f"it supports only {' and '.join(backend.dtypes)}"
    if inputs.dtypes.kv == FP8_KV and not backend.supports_fp8_kv:
        yield f"it reads K and V only in {' and '.join(backend.dtypes)}, and --kv-dtype fp8 was requested"
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
