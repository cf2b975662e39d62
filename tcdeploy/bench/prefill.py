"""How long a prompt waits for its first token, alone in an idle engine, and how far that is from the arithmetic.

Each prompt is new and random, so that no prefix cache helps. `first_token_ms` is what the caller of `submit` sees;
`device_ms` is the prompt's steps alone. The floor counts one pass over the prompt (floor.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tcdeploy.bench.baselines import PlainModel
from tcdeploy.bench.timing import step_seconds
from tcdeploy.bench.floor import Reads, prefill_floor_ms, share_of_floor, weigh
from tcdeploy.bench.report import Report, Row
from tcdeploy.bench.session import Session, begin, make_report
from tcdeploy.bench.settings import PrefillSettings
from tcdeploy.bench.stats import Summary, summarise
from tcdeploy.bench.engine_driver import FIRST_TOKENS, Prompts, first_token_seconds, placed, prefill_step, rest
from tcdeploy.errors import UsageError
from tcdeploy.pipeline import Deployment
from tcdeploy.planning.plan import Plan
from tcdeploy.progress import Progress
from tcdeploy.planning.recipe import Recipe


@dataclass(frozen=True)
class PrefillRow(Row):
    """Prompts of one length. `first_token_ms` is over prompts; `share_of_floor` is the floor over its median."""

    tokens: int
    first_token_ms: Summary
    device_ms: Summary | None
    floor_ms: float | None
    share_of_floor: float | None


def run(recipe: Recipe, settings: PrefillSettings, progress: Progress) -> Report:
    session = begin(recipe, settings, progress)
    plan = session.decided.plan
    lengths = lengths_to_measure(plan, settings)
    rows = session.measure(
        lambda subject, deployment: measure(subject, deployment, lengths, session, settings),
        lambda plain: measure_plain(plain, lengths, session, settings),
    )
    return make_report(session, "prefill", settings, rows)


def lengths_to_measure(plan: Plan, settings: PrefillSettings) -> tuple[int, ...]:
    """Those that were asked for, or the default ones that fit. Raises UsageError where no default does."""
    if settings.lengths is not None:
        return settings.lengths
    lengths = tuple(length for length in settings.DEFAULT_LENGTHS if length + FIRST_TOKENS <= plan.context)
    if not lengths:
        raise UsageError(f"no default prompt length fits into a context of {plan.context}", "--lengths 32")
    return lengths


def measure(
    subject: str, deployment: Deployment, lengths: tuple[int, ...], session: Session, settings: PrefillSettings
) -> Iterator[PrefillRow]:
    engine, plan = deployment.engine, deployment.plan
    prompts = Prompts(deployment.architecture.vocab_size, settings.seed)
    reads = weigh(engine.runner.model, plan.weight_bytes)
    for length in lengths:
        session.progress.stage(f"prompts of {length}")
        first_token_seconds(engine, prompts.draw(length))  # the first one of a length pays for its buffers
        seconds = [first_token_seconds(engine, prompts.draw(length)) for _ in range(settings.repeats)]
        with placed(engine, prompts, 1, length) as (sequence,):
            step = prefill_step(engine, sequence)
            device_seconds = step_seconds(plan.device, lambda: None, step, settings.repeats)
        yield _row(subject, length, seconds, device_seconds, reads, session)


def measure_plain(
    plain: PlainModel, lengths: tuple[int, ...], session: Session, settings: PrefillSettings
) -> Iterator[PrefillRow]:
    """One new token: `generate` compiles no prefill, so all of it is the model's own forward."""
    prompts = Prompts(session.decided.architecture.vocab_size, settings.seed)
    reads = weigh(plain.model, plain.plan.weight_bytes)
    for length in lengths:
        session.progress.stage(f"{plain.name} prompts of {length}")
        seconds = []
        for _ in range(settings.repeats):
            rest(plain.plan.device)
            seconds.append(plain.token_seconds([prompts.draw(length)], 1)[0])
        yield _row(plain.name, length, seconds, None, reads, session)


def _row(
    subject: str, length: int, seconds: list[float], device_seconds: list[float] | None, reads: Reads, session: Session
) -> PrefillRow:
    first_token_ms = summarise(one * 1e3 for one in seconds)
    floor_ms = prefill_floor_ms(length, session.rates, reads)
    return PrefillRow(
        subject,
        length,
        first_token_ms,
        summarise(one * 1e3 for one in device_seconds) if device_seconds else None,
        floor_ms,
        share_of_floor(floor_ms, summarise(one * 1e3 for one in device_seconds or seconds).p50),
    )
