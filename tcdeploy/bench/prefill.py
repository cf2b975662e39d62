"""`bench prefill`: time to first token by prompt length, for single prompts on an idle engine, beside the floor.

Prompts are random, so that the prefix cache never hits. `first_token_ms` is measured from `submit`; `device_ms` is
the time of the prefill steps alone. The floor counts one pass over the prompt (floor.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from tcdeploy.bench.baselines import BaselineModel
from tcdeploy.bench.engine_driver import Prompts, cool_down, measure_ttft, placed_sequences, prefill_step
from tcdeploy.bench.floor import WeightSizes, count_weights, prefill_floor_ms, share_of_floor
from tcdeploy.bench.report import Row
from tcdeploy.bench.session import Session, run_benchmark
from tcdeploy.bench.settings import PrefillSettings
from tcdeploy.bench.stats import Summary, summarize_ms
from tcdeploy.bench.timing import step_seconds
from tcdeploy.start.deployment import Deployment


@dataclass(frozen=True)
class PrefillRow(Row):
    """Prompts of one length. `share_of_floor` is the floor over the median device time (else time to first token)."""

    tokens: int
    first_token_ms: Summary
    device_ms: Summary | None
    floor_ms: float | None
    share_of_floor: float | None


def measure(subject: str, deployment: Deployment, session: Session[PrefillSettings]) -> Iterator[PrefillRow]:
    engine, plan, settings = deployment.engine, deployment.plan, session.settings
    prompts = Prompts(deployment.planned.architecture.vocab_size, settings.seed)
    weights = count_weights(engine.runner.model, plan.weight_bytes)
    session.add_notes(weights.notes)
    for length in settings.lengths_within(plan):
        session.progress.stage(f"prompts of {length}")
        measure_ttft(engine, prompts.draw(length))  # untimed: the first prompt of a length allocates buffers
        seconds = [measure_ttft(engine, prompts.draw(length)) for _ in range(settings.repeats)]
        with placed_sequences(engine, prompts, 1, length) as (sequence,):
            step = prefill_step(engine, sequence)
            device_seconds = step_seconds(plan.device, lambda: None, step, settings.repeats)
        yield _row(subject, length, seconds, summarize_ms(device_seconds), weights, session)


def measure_baseline(baseline: BaselineModel, session: Session[PrefillSettings]) -> Iterator[PrefillRow]:
    """Time one new token. `generate` does not compile prefill, so this is an eager forward for every baseline."""
    prompts = Prompts(session.planned.architecture.vocab_size, session.settings.seed)
    weights = count_weights(baseline.model, baseline.plan.weight_bytes)
    for length in session.settings.lengths_within(baseline.plan):
        session.progress.stage(f"{baseline.name} prompts of {length}")
        seconds = []
        for _ in range(session.settings.repeats):
            cool_down(baseline.plan.device)
            seconds.append(baseline.token_times([prompts.draw(length)], 1)[0])
        yield _row(baseline.name, length, seconds, None, weights, session)


def _row(
    subject: str, length: int, seconds: list[float], device_ms: Summary | None, weights: WeightSizes,
    session: Session[PrefillSettings],
) -> PrefillRow:  # fmt: skip
    first_token_ms = summarize_ms(seconds)
    in_fp8 = session.planned.plan.fp8_min_rows > 0
    floor_ms = prefill_floor_ms(length, session.rates, weights, in_fp8)
    share = share_of_floor(floor_ms, (device_ms or first_token_ms).p50)
    return PrefillRow(subject, length, first_token_ms, device_ms, floor_ms, share)


run = partial(run_benchmark, "prefill", measure, measure_baseline)
