"""How long a decode step takes, per bucket, and how far that is from reading the weights once.

Each bucket is measured twice. The step alone, over sequences that are put back to one context before each repeat: what
the device does. Then the running engine with the bucket full: what a caller gets, with the host's work beside it. The
difference of the two is what the host costs, and should be nothing while the host is one step ahead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tcdeploy.bench.baselines import BaselineModel
from tcdeploy.bench.breakdown import Breakdown, profile_step
from tcdeploy.bench.engine_driver import Prompts, SteadyRun, decode_step, placed_sequences, run_steady, steady_shape
from tcdeploy.bench.floor import DecodeFloor, count_weights, decode_floor, share_of_floor
from tcdeploy.bench.report import Report, Row, price_per_million
from tcdeploy.bench.session import Session, make_report, start_session
from tcdeploy.bench.settings import DecodeSettings
from tcdeploy.bench.stats import Summary, intervals, summarise
from tcdeploy.bench.timing import step_seconds
from tcdeploy.pipeline import Deployment
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.progress import Progress


@dataclass(frozen=True)
class DecodeRow(Row):
    """A bucket. `step_ms` is over the repeats of one step; of eager and generate, over the gaps between tokens.

    The rest below `share_of_floor` is of the running engine, at about the same context.
    """

    batch: int
    context: int
    step_ms: Summary
    bytes_read: int
    floor_ms: float | None
    share_of_floor: float | None
    tokens_per_second: float | None  # None: no room for the bucket full of growing requests
    price_per_million_tokens: float | None
    wall_ms: float | None = None
    host_us: float | None = None
    first_call_seconds: float | None = None
    breakdown: Breakdown | None = None


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes. `other_bytes` is all else that the device holds now: graphs, workspaces, the CUDA context, neighbours."""

    total_bytes: int
    weight_bytes: int
    kv_bytes: int
    other_bytes: int


def run(recipe: Recipe, settings: DecodeSettings, progress: Progress) -> Report:
    session = start_session(recipe, settings, progress)
    memory: list[DeviceMemory | None] = []

    def measure_deployment(subject: str, deployment: Deployment) -> Iterator[Row]:
        yield from measure(subject, deployment, session, settings)
        memory.append(device_memory(deployment.plan))

    rows = session.measure(measure_deployment, lambda baseline: measure_baseline(baseline, session, settings))
    return make_report(session, "decode", settings, rows, device_memory=memory[0] and dataclasses.asdict(memory[0]))


def measure(subject: str, deployment: Deployment, session: Session, settings: DecodeSettings) -> Iterator[DecodeRow]:
    engine, plan = deployment.engine, deployment.plan
    prompts = Prompts(deployment.architecture.vocab_size, settings.seed)
    weights = count_weights(engine.runner.model, plan.weight_bytes)
    for bucket in plan.decode_buckets:
        session.progress.stage(bucket.name)
        batch, context = bucket.size, effective_context(plan, bucket.size, settings)
        with placed_sequences(engine, prompts, batch, context) as sequences:
            restore, step = decode_step(engine, sequences)
            seconds = step_seconds(plan.device, restore, step, settings.repeats)
            breakdown = profile_step(restore, step) if settings.breakdown else None
        steady = _run_steady(deployment, prompts, batch, context, settings.steps)
        floor = decode_floor(weights, deployment.architecture, plan.kv_dtype, session.rates, batch, context)
        rate = steady.tokens / steady.wall_seconds if steady else None
        yield DecodeRow(
            subject,
            batch,
            context,
            *_floor_columns(seconds, floor),
            rate,
            price_per_million(rate, settings.price_per_hour),
            wall_ms=steady.wall_seconds / steady.steps * 1e3 if steady else None,
            host_us=steady.host_seconds / steady.steps * 1e6 if steady and steady.host_seconds is not None else None,
            breakdown=breakdown,
        )


def _floor_columns(seconds: list[float], floor: DecodeFloor) -> tuple[Summary, int, float | None, float | None]:
    """(step_ms, bytes_read, floor_ms, share_of_floor) of a row."""
    step_ms = summarise(one * 1e3 for one in seconds)
    return step_ms, floor.bytes_read, floor.floor_ms, share_of_floor(floor.floor_ms, step_ms.p50)


def effective_context(plan: Plan, batch: int, settings: DecodeSettings) -> int:
    """Tokens that each sequence of a full bucket holds; a row says so where it is less than what was asked."""
    held = (plan.kv_blocks - 1) // batch * plan.block_size
    return min(settings.context_length or settings.DEFAULT_CONTEXT, plan.context, held)


def _run_steady(deployment: Deployment, prompts: Prompts, batch: int, context: int, steps: int) -> SteadyRun | None:
    shape = steady_shape(deployment.plan, batch, context, steps)
    if shape is None:
        return None
    drawn = [prompts.draw(shape.prompt_length) for _ in range(batch)]
    return run_steady(deployment.engine, drawn, shape.new_tokens, shape.steps)


def measure_baseline(baseline: BaselineModel, session: Session, settings: DecodeSettings) -> Iterator[DecodeRow]:
    """Whole batches from a prompt on, so that the context is passed half way."""
    plan, architecture = baseline.plan, session.planned.architecture
    prompts = Prompts(architecture.vocab_size, settings.seed)
    weights = count_weights(baseline.model, plan.weight_bytes)
    for bucket in plan.decode_buckets:
        session.progress.stage(f"{baseline.name} {bucket.name}")
        batch, context = bucket.size, effective_context(plan, bucket.size, settings)
        steps = max(1, min(settings.steps, context - 1))
        length = max(1, min(context - steps // 2, plan.context - steps - 1))
        drawn = [prompts.draw(length) for _ in range(batch)]
        first_call_seconds = baseline.first_call_seconds(drawn, steps + 1)
        times = baseline.token_times(drawn, steps + 1)
        floor = decode_floor(weights, architecture, plan.kv_dtype, session.rates, batch, context)
        rate = batch * steps / (times[-1] - times[0])
        yield DecodeRow(
            baseline.name,
            batch,
            context,
            *_floor_columns(intervals(times), floor),
            rate,
            price_per_million(rate, settings.price_per_hour),
            first_call_seconds=first_call_seconds,
        )


def device_memory(plan: Plan) -> DeviceMemory | None:
    """None on a CPU, where nobody can say what of the host's memory is ours."""
    if plan.device != "cuda":
        return None
    torch.cuda.empty_cache()  # what the measuring itself left in torch's allocator is nobody's
    free, total = torch.cuda.mem_get_info()
    return DeviceMemory(total, plan.weight_bytes, plan.kv_bytes, total - free - plan.weight_bytes - plan.kv_bytes)
