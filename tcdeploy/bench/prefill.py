"""How long a prompt waits for its first token, alone in an idle engine, and how far that is from the arithmetic.

Each prompt is new and random, so that no prefix cache helps. `first_token_ms` is what the caller of `submit` sees;
`device_ms` is the prompt's steps alone. The floor counts one pass over the prompt (floor.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tcdeploy.bench.baselines import BaselineModel
from tcdeploy.bench.engine_driver import (
    TTFT_NEW_TOKENS,
    Prompts,
    cool_down,
    measure_ttft,
    placed_sequences,
    prefill_step,
)
from tcdeploy.bench.floor import WeightSizes, count_weights, prefill_floor_ms, share_of_floor
from tcdeploy.bench.report import Report, Row
from tcdeploy.bench.session import Session, make_report, start_session
from tcdeploy.bench.settings import PrefillSettings
from tcdeploy.bench.stats import Summary, summarise
from tcdeploy.bench.timing import step_seconds
from tcdeploy.errors import UsageError
from tcdeploy.pipeline import Deployment
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.progress import Progress


@dataclass(frozen=True)
class PrefillRow(Row):
    """Prompts of one length. `first_token_ms` is over prompts; `share_of_floor` is the floor over its median."""

    tokens: int
    first_token_ms: Summary
    device_ms: Summary | None
    floor_ms: float | None
    share_of_floor: float | None


def run(recipe: Recipe, settings: PrefillSettings, progress: Progress) -> Report:
    session = start_session(recipe, settings, progress)
    plan = session.planned.plan
    lengths = lengths_to_measure(plan, settings)
    rows = session.measure(
        lambda subject, deployment: measure(subject, deployment, lengths, session, settings),
        lambda baseline: measure_baseline(baseline, lengths, session, settings),
    )
    return make_report(session, "prefill", settings, rows)


def lengths_to_measure(plan: Plan, settings: PrefillSettings) -> tuple[int, ...]:
    """Those that were asked for, or the default ones that fit. Raises UsageError where no default does."""
    if settings.lengths is not None:
        return settings.lengths
    lengths = tuple(length for length in settings.DEFAULT_LENGTHS if length + TTFT_NEW_TOKENS <= plan.context)
    if not lengths:
        raise UsageError(f"no default prompt length fits into a context of {plan.context}", "--lengths 32")
    return lengths


def measure(
    subject: str, deployment: Deployment, lengths: tuple[int, ...], session: Session, settings: PrefillSettings
) -> Iterator[PrefillRow]:
    engine, plan = deployment.engine, deployment.plan
    prompts = Prompts(deployment.architecture.vocab_size, settings.seed)
    weights = count_weights(engine.runner.model, plan.weight_bytes)
    for length in lengths:
        session.progress.stage(f"prompts of {length}")
        measure_ttft(engine, prompts.draw(length))  # the first one of a length pays for its buffers
        seconds = [measure_ttft(engine, prompts.draw(length)) for _ in range(settings.repeats)]
        with placed_sequences(engine, prompts, 1, length) as (sequence,):
            step = prefill_step(engine, sequence)
            device_seconds = step_seconds(plan.device, lambda: None, step, settings.repeats)
        yield _row(subject, length, seconds, device_seconds, weights, session)


def measure_baseline(
    baseline: BaselineModel, lengths: tuple[int, ...], session: Session, settings: PrefillSettings
) -> Iterator[PrefillRow]:
    """One new token: `generate` compiles no prefill, so all of it is the model's own forward."""
    prompts = Prompts(session.planned.architecture.vocab_size, settings.seed)
    weights = count_weights(baseline.model, baseline.plan.weight_bytes)
    for length in lengths:
        session.progress.stage(f"{baseline.name} prompts of {length}")
        seconds = []
        for _ in range(settings.repeats):
            cool_down(baseline.plan.device)
            seconds.append(baseline.token_times([prompts.draw(length)], 1)[0])
        yield _row(baseline.name, length, seconds, None, weights, session)


def _row(
    subject: str,
    length: int,
    seconds: list[float],
    device_seconds: list[float] | None,
    weights: WeightSizes,
    session: Session,
) -> PrefillRow:
    first_token_ms = summarise(one * 1e3 for one in seconds)
    floor_ms = prefill_floor_ms(length, session.rates, weights)
    return PrefillRow(
        subject,
        length,
        first_token_ms,
        summarise(one * 1e3 for one in device_seconds) if device_seconds else None,
        floor_ms,
        share_of_floor(floor_ms, summarise(one * 1e3 for one in device_seconds or seconds).p50),
    )
