"""Chooses the attention backends, the CUDA graphs that they allow, and mixed steps. Does not import torch."""

from __future__ import annotations

import math

from tcdeploy.errors import UsageError
from tcdeploy.planning.backends import BACKENDS, Backend, Phase
from tcdeploy.planning.capability import Supported, Unsupported, check_backend
from tcdeploy.planning.decision import Decision, PlanInputs
from tcdeploy.planning.recipe import Attention, Graphs, Recipe

# Shorter prefill buckets are not tuned over backends: attention is too small a part of their step.
TUNED_ATTENTION_MIN_TOKENS = 4096
ITL_TARGET_DECODE_STEPS = 3  # default ITL target, in predicted times of a decode step of the same rows


def decide_prefill_attention(inputs: PlanInputs, decisions: list[Decision]) -> Attention:
    """The requested backend, or the first supported one. Raises UsageError if the requested one is unsupported."""
    requested = inputs.recipe.attention
    if requested is None:
        return _first_supported("prefill", inputs, decisions)
    match check_backend(requested, inputs):
        case Unsupported(_, reason):
            raise UsageError(
                f"attention {requested} cannot be used: {reason}", "omit --attention to use the best supported backend"
            )
    decisions.append(Decision("prefill attention", requested, "requested"))
    return requested


def decide_decode_attention(inputs: PlanInputs, decisions: list[Decision]) -> Attention:
    """The requested backend if it serves decode, else the first supported one.

    The K and V of prefill are written by the decode backend's kernel too.
    """
    requested = inputs.recipe.attention
    if requested is not None and BACKENDS[requested].serves_decode:
        decisions.append(Decision("decode attention", requested, "requested"))
        return requested
    return _first_supported("decode", inputs, decisions)


def decide_alternative_attention(inputs: PlanInputs, decisions: list[Decision]) -> tuple[Attention, ...]:
    """Backends that `--mode auto` may time in long prefill buckets; none if a backend was requested.

    They do not depend on the tuning time, so that a later start without it has the same plan key and its timings.
    """
    if inputs.recipe.mode != "auto" or inputs.recipe.attention:
        return ()
    tuned = tuple(
        backend.name
        for backend in BACKENDS.values()
        if backend.selection == "tuned" and isinstance(check_backend(backend.name, inputs), Supported)
    )
    if tuned:
        buckets = f"prefill buckets of at least {TUNED_ATTENTION_MIN_TOKENS} tokens"
        is_timed = inputs.recipe.tune_seconds > 0
        reason = f"installed; timed in {buckets}" if is_timed else f"installed; timed by --tune-seconds in {buckets}"
        decisions.append(Decision("other attention", ",".join(tuned), reason))
    return tuned


def decide_graphs(inputs: PlanInputs, decode_attention: Attention, decisions: list[Decision]) -> Graphs:
    """How CUDA graphs are captured. Raises UsageError for a request that contradicts mode, shapes or attention."""
    recipe, requested = inputs.recipe, inputs.recipe.graphs
    if requested == "region" and recipe.shapes == "dynamic":
        raise UsageError(
            "--graphs region cannot be combined with --shapes dynamic: it would capture a graph for every length",
            "--graphs step --shapes dynamic",
        )
    if inputs.device == "cuda" and not BACKENDS[decode_attention].is_capturable:
        if requested not in (None, "none"):
            raise UsageError(
                f"graphs {requested} cannot capture {decode_attention} attention: it reads lengths on the host",
                "--graphs none",
            )
        reason = f"{decode_attention} attention reads lengths on the host"
        decisions.append(Decision("graphs", "none", reason, is_fallback=True))
        return "none"
    if inputs.device == "cpu":
        reason = "CUDA graphs require a GPU"
        decisions.append(Decision("graphs", "none", reason, is_fallback=requested not in (None, "none")))
        return "none"
    if recipe.mode == "default":
        if requested not in (None, "none"):
            raise UsageError(
                f"mode default does not use CUDA graphs, but graphs {requested} was requested",
                f"--mode reduce-overhead --graphs {requested}",
            )
        decisions.append(Decision("graphs", "none", "mode default does not use CUDA graphs"))
        return "none"
    if requested:
        decisions.append(Decision("graphs", requested, "requested"))
        return requested
    decisions.append(
        Decision("graphs", "step", "one launch per step; per-region graphs took 2.4 times as long on an H100")
    )
    return "step"


def decide_mixed_steps(inputs: PlanInputs, graphs: Graphs, attention: Attention, decisions: list[Decision]) -> bool:
    """Whether running sequences decode in the steps in which prompts are computed.

    `attention`: of prefill. Raises UsageError if that is requested together with a CUDA graph per region, whose shapes
    would depend on the rows.
    """
    requested = inputs.recipe.mixed_steps
    if graphs == "region":
        if requested == "on":
            raise UsageError(
                "--mixed-steps on cannot be combined with --graphs region: it would capture a graph for each number of "
                "rows",
                "--mixed-steps on --graphs step",
            )
        decisions.append(Decision("mixed steps", "off", "one CUDA graph per region"))
        return False
    if requested:
        decisions.append(Decision("mixed steps", requested, "requested"))
        return requested == "on"
    if graphs == "step" and not BACKENDS[attention].is_capturable:
        reason = "only decode steps are captured as CUDA graphs; mixed steps would decode without one"
        decisions.append(Decision("mixed steps", "off", reason))
        return False
    decisions.append(Decision("mixed steps", "on", "sequences decode while prompts are computed"))
    return True


def decide_itl_target(recipe: Recipe, mixed_steps: bool, decisions: list[Decision]) -> float | None:
    """Limit of a mixed step's predicted time in ms; None: ITL_TARGET_DECODE_STEPS decode steps of its rows.

    Raises UsageError if the requested target is not a positive, finite number.
    """
    target = recipe.itl_target
    if target is not None and not 0 < target < math.inf:
        raise UsageError(f"itl_target is {target}; it must be a positive number of milliseconds", "--itl-target 20")
    if target is not None:
        reason = "requested" if mixed_steps else "requested, but not used: steps are not mixed"
        decisions.append(Decision("ITL target", f"{target:g} ms", reason, is_fallback=not mixed_steps))
    elif mixed_steps:
        value = f"{ITL_TARGET_DECODE_STEPS} decode steps"
        decisions.append(Decision("ITL target", value, "default; of the same rows, predicted from timed steps"))
    return target


def _first_supported(phase: Phase, inputs: PlanInputs, decisions: list[Decision]) -> Attention:
    """The first backend in the table that serves `phase` here. The reference backend supports every model."""
    rejections: list[str] = []
    for backend in BACKENDS.values():
        if backend.selection == "tuned" or not backend.serves(phase):
            continue
        match check_backend(backend.name, inputs):
            case Supported():
                decisions.append(_selected(phase, backend, inputs, rejections))
                return backend.name
            case Unsupported(_, reason):
                rejections.append(f"not {backend.name}: {reason}")
    raise AssertionError(f"no row of the backend table serves {phase} on every machine")


def _selected(phase: Phase, backend: Backend, inputs: PlanInputs, rejections: list[str]) -> Decision:
    name = f"{phase} attention"
    if inputs.device == "cpu":
        return Decision(name, backend.name, "the other backends require a GPU")
    reasons = [backend.reason(phase), *rejections]
    return Decision(name, backend.name, "; ".join(reasons), is_fallback=backend.selection == "fallback")
