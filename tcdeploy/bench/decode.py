"""`bench decode`: the time of a decode step per bucket, beside the time to read weights and KV cache once.

Each bucket is measured twice. First an isolated step, with the sequences reset to the same context before each
repeat: the device time. Then steps of the running engine with a full bucket: what a caller sees, including the host's
work. The difference is host overhead, and should be zero while the host runs one step ahead of the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from tcdeploy.bench.baselines import BaselineModel
from tcdeploy.bench.breakdown import Breakdown, profile_replays, summarize_replays
from tcdeploy.bench.engine_driver import Prompts, SteadyRun, decode_step, placed_sequences, run_steady, steady_shape
from tcdeploy.bench.floor import WeightSizes, count_weights, decode_floor, kv_read_bytes, share_of_floor
from tcdeploy.bench.report import Row
from tcdeploy.bench.session import Session, run_benchmark
from tcdeploy.bench.settings import DecodeSettings
from tcdeploy.bench.stats import Summary, intervals, summarize_ms
from tcdeploy.bench.timing import step_seconds
from tcdeploy.planning.plan import Plan
from tcdeploy.start.deployment import Deployment

MAX_STEADY_RUNS = 4  # of a bucket, until no request ends early


@dataclass(frozen=True)
class DecodeRow(Row):
    """One bucket. `step_ms` summarizes isolated steps; for `eager` and `generate`, the intervals between tokens.

    The fields after `share_of_floor` are measured on the running engine, at about the same context.
    """

    batch: int
    context: int
    step_ms: Summary
    bytes_moved: int
    floor_ms: float | None
    share_of_floor: float | None
    tokens_per_second: float | None  # None: the KV cache cannot hold a full bucket of growing sequences
    wall_ms: float | None = None
    host_us: float | None = None
    first_call_seconds: float | None = None
    breakdown: Breakdown | None = None


def measure(subject: str, deployment: Deployment, session: Session[DecodeSettings]) -> Iterator[DecodeRow]:
    engine, plan, settings = deployment.engine, deployment.plan, session.settings
    prompts = Prompts(deployment.planned.architecture.vocab_size, settings.seed)
    weights = count_weights(engine.runner.model, plan.weight_bytes)
    session.add_notes(weights.notes)
    for bucket in plan.decode_buckets:
        session.progress.stage(bucket.name)
        batch, context = bucket.size, effective_context(plan, bucket.size, settings)
        with placed_sequences(engine, prompts, batch, context) as sequences:
            restore, step = decode_step(engine, sequences)
            seconds = step_seconds(plan.device, restore, step, settings.repeats)
            breakdown = summarize_replays(profile_replays(restore, step)) if settings.breakdown else None
        steady = _run_steady(deployment, prompts, batch, context, settings.steps)
        row = _row(
            subject, session, weights, batch, context, seconds, steady.tokens / steady.wall_seconds if steady else None
        )
        yield replace(
            row,
            wall_ms=steady.wall_seconds / steady.steps * 1e3 if steady else None,
            host_us=steady.host_seconds / steady.steps * 1e6 if steady and steady.host_seconds is not None else None,
            breakdown=breakdown,
        )
    session.extra.setdefault("device_memory", device_memory(plan))  # of the deployment, not of a baseline


def _row(
    subject: str, session: Session[DecodeSettings], weights: WeightSizes, batch: int, context: int,
    seconds: list[float], rate: float | None,
) -> DecodeRow:  # fmt: skip
    """`seconds`: of each step. `rate`: tokens per second."""
    plan, step_ms = session.planned.plan, summarize_ms(seconds)
    read_bytes = kv_read_bytes(session.planned.architecture, plan.kv_dtype, context)
    floor = decode_floor(weights, read_bytes + 2 * plan.bytes_per_slot, session.rates, batch)  # slots are written too
    return DecodeRow(
        subject, batch, context, step_ms, floor.bytes_moved, floor.floor_ms,
        share_of_floor(floor.floor_ms, step_ms.p50), rate,
    )  # fmt: skip


def effective_context(plan: Plan, batch: int, settings: DecodeSettings) -> int:
    """Context per sequence of a full bucket: the requested length, or less if the KV cache is smaller."""
    capacity = (plan.kv_blocks - 1) // batch * plan.block_size
    return min(settings.context_length or settings.DEFAULT_CONTEXT, plan.context, capacity)


def _run_steady(deployment: Deployment, prompts: Prompts, batch: int, context: int, steps: int) -> SteadyRun | None:
    """Steps in which all requests decode, or None if the KV cache has no room for them.

    The limit of a step's time may split prompts into more chunks than expected. If the first request has ended before
    the last step, the run is repeated with shorter prompts, which leave room for as many early steps.
    """
    early_steps = None
    for _ in range(MAX_STEADY_RUNS):
        shape = steady_shape(deployment.plan, batch, context, steps, early_steps)
        if shape is None:
            return None
        batch_prompts = [prompts.draw(shape.prompt_length) for _ in range(batch)]
        run = run_steady(deployment.engine, batch_prompts, shape.new_tokens, shape.steps)
        if run.tokens == shape.steps * batch:
            return run
        early_steps = run.early_steps + run.early_steps // 10 + 3
    return None


def measure_baseline(baseline: BaselineModel, session: Session[DecodeSettings]) -> Iterator[DecodeRow]:
    """Time whole batches. The prompt length is chosen so that the context is reached halfway through the steps."""
    plan, settings = baseline.plan, session.settings
    prompts = Prompts(session.planned.architecture.vocab_size, settings.seed)
    weights = count_weights(baseline.model, plan.weight_bytes)
    for bucket in plan.decode_buckets:
        session.progress.stage(f"{baseline.name} {bucket.name}")
        batch, context = bucket.size, effective_context(plan, bucket.size, settings)
        steps = max(1, min(settings.steps, context - 1))
        length = max(1, min(context - steps // 2, plan.context - steps - 1))
        batch_prompts = [prompts.draw(length) for _ in range(batch)]
        first_call_seconds = baseline.first_call_seconds(batch_prompts, steps + 1)
        times = baseline.token_times(batch_prompts, steps + 1)
        rate = batch * steps / (times[-1] - times[0])
        row = _row(baseline.name, session, weights, batch, context, intervals(times), rate)
        yield replace(row, first_call_seconds=first_call_seconds)


def device_memory(plan: Plan) -> dict[str, int] | None:
    """Bytes in use now; None on a CPU, where the share of the deployment cannot be measured.

    `other_bytes`: graphs, workspaces, the CUDA context, and other processes on the device.
    """
    if plan.device != "cuda":
        return None
    torch.cuda.empty_cache()  # return what the measurement itself left in the caching allocator
    free, total = torch.cuda.mem_get_info()
    known = {"weight_bytes": plan.weight_bytes, "kv_bytes": plan.kv_bytes, "slot_bytes": plan.slot_bytes}
    return {"total_bytes": total, **known, "other_bytes": total - free - sum(known.values())}


run = partial(run_benchmark, "decode", measure, measure_baseline)
