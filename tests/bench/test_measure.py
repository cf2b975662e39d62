"""Decode, prefill and throughput of the embedded model, as a deployment and as a baseline, in this process."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from tcdeploy.bench import decode, prefill, throughput
from tcdeploy.bench.baselines import BaselineModel
from tcdeploy.bench.floor import Rates
from tcdeploy.bench.session import Session, region_recipe
from tcdeploy.bench.settings import DecodeSettings, PrefillSettings, ThroughputSettings
from tcdeploy.bench.timing import Timestamps, step_seconds
from tcdeploy.errors import UsageError
from tcdeploy.host.progress import NullProgress
from tcdeploy.planning.recipe import Recipe, build_recipe
from tcdeploy.start.decide import decide
from tests.conftest import TINY, TINY_BATCH_SIZES, TINY_BUCKETS

RATES = Rates(1e10, 1 << 20, 1e11, 256, "float32")


@pytest.fixture
def session(cache_dir: str) -> Session:
    flags = {"model": TINY, "buckets": TINY_BUCKETS, "batch_sizes": TINY_BATCH_SIZES, "cache_dir": cache_dir}
    recipe = build_recipe(flags, environ={})
    return Session(recipe, DecodeSettings(), NullProgress(), decide(recipe), RATES)


@pytest.fixture
def baseline(reference_tiny: Any, session: Session) -> BaselineModel:
    return BaselineModel("eager", reference_tiny, session.planned.plan)


def test_a_decode_row_for_each_bucket(tiny_deployment: Any, session: Session, baseline: BaselineModel) -> None:
    settings = DecodeSettings(context_length=48, repeats=4, steps=6)
    session = replace(session, settings=settings)
    rows = list(decode.measure("tcdeploy", tiny_deployment, session))
    rows += list(decode.measure_baseline(baseline, session))
    assert session.extra == {"device_memory": None}
    assert [(row.subject, row.batch, row.context) for row in rows] == [
        ("tcdeploy", 1, 48), ("tcdeploy", 4, 48), ("eager", 1, 48), ("eager", 4, 48),
    ]  # fmt: skip
    for row in rows:
        assert row.step_ms.count == (4 if row.subject == "tcdeploy" else 6)
        assert row.bytes_moved == tiny_deployment.plan.weight_bytes + row.batch * 48 * 6 * 2 * 2 * 32 * 4
        assert row.floor_ms == pytest.approx(row.bytes_moved / 1e7)
        assert row.share_of_floor == pytest.approx(row.floor_ms / row.step_ms.p50)
        assert row.tokens_per_second
        assert row.host_us is None and row.breakdown is None
    assert rows[0].wall_ms and rows[2].first_call_seconds and rows[2].wall_ms is None


def test_the_context_is_the_requested_one_or_less_where_the_cache_is_smaller(session: Session) -> None:
    plan = session.planned.plan
    assert decode.effective_context(plan, 4, DecodeSettings()) == 512
    assert decode.effective_context(plan, 4, DecodeSettings(context_length=700)) == 700
    assert decode.effective_context(plan, plan.kv_blocks - 1, DecodeSettings()) == plan.block_size


def test_a_prefill_row_for_each_length(tiny_deployment: Any, session: Session, baseline: BaselineModel) -> None:
    settings = PrefillSettings(lengths=(8, 200), repeats=3)
    start = time.perf_counter()
    rows = list(prefill.measure("tcdeploy", tiny_deployment, replace(session, settings=settings)))
    wall_ms = (time.perf_counter() - start) * 1e3
    rows += list(prefill.measure_baseline(baseline, replace(session, settings=settings)))
    assert [(row.subject, row.tokens) for row in rows] == [
        ("tcdeploy", 8), ("tcdeploy", 200), ("eager", 8), ("eager", 200),
    ]  # fmt: skip
    assert all(row.first_token_ms.count == 3 for row in rows)
    body = sum(item.numel() for item in tiny_deployment.engine.runner.model.parameters()) - 2048 * 192  # tied embedding
    assert rows[1].floor_ms == pytest.approx(2 * body * 200 / 1e11 * 1e3)
    assert rows[0].floor_ms == pytest.approx(tiny_deployment.plan.weight_bytes / 1e10 * 1e3)
    assert rows[1].device_ms and rows[1].device_ms.count == 3 and rows[2].device_ms is None
    assert sum(3 * (row.first_token_ms.p10 + row.device_ms.p10) for row in rows[:2] if row.device_ms) < wall_ms
    assert rows[1].share_of_floor == pytest.approx(rows[1].floor_ms / rows[1].device_ms.p50)
    assert rows[3].share_of_floor == pytest.approx(rows[3].floor_ms / rows[3].first_token_ms.p50)


def test_default_lengths_are_those_that_fit_the_context(session: Session) -> None:
    assert PrefillSettings().lengths_within(session.planned.plan) == (128, 512)
    assert PrefillSettings(lengths=(7,)).lengths_within(session.planned.plan) == (7,)


@pytest.mark.parametrize("rate", [math.inf, 100.0])
def test_every_request_runs_to_its_full_length(tiny_deployment: Any, session: Session, rate: float) -> None:
    settings = ThroughputSettings(requests=6, input_length=12, output_length=5, request_rate=rate)
    [row] = throughput.measure("tcdeploy", tiny_deployment, replace(session, settings=settings))
    assert isinstance(row, throughput.ThroughputRow) and row.engine
    assert row.requests == row.latencies.first_token_ms.count == 6
    assert row.latencies.token_gap_ms and row.latencies.token_gap_ms.count == 6 * 4
    assert row.output_tokens_per_second * row.seconds == pytest.approx(6 * 5)
    assert row.total_tokens_per_second * row.seconds == pytest.approx(6 * 17)
    assert 1 <= row.engine.peak_running <= 4
    assert (row.engine.compiles, row.engine.captures, row.engine.preemptions) == (0, 0, 0)
    assert row.engine.prefix_hit_tokens == 0 and row.engine.host_us is None
    assert all(arrival <= first <= last <= row.seconds + 1e-9 for arrival, first, last in row.request_timings)
    assert not tiny_deployment.engine.has_work


def test_a_client_sends_its_next_request_after_a_complete_response(tiny_deployment: Any, session: Session) -> None:
    settings = ThroughputSettings(requests=6, input_length=12, output_length=5, concurrency=2)
    [row] = throughput.measure("tcdeploy", tiny_deployment, replace(session, settings=settings))
    assert isinstance(row, throughput.ThroughputRow) and row.engine
    assert row.requests == 6 and row.engine.peak_running == 2
    arrivals = sorted(arrival for arrival, _, _ in row.request_timings)
    ends = sorted(last_token for _, _, last_token in row.request_timings)
    assert all(end <= arrival for end, arrival in zip(ends, arrivals[2:], strict=False))
    assert not tiny_deployment.engine.has_work


def test_a_baseline_runs_batches_one_after_another(session: Session, baseline: BaselineModel) -> None:
    settings = ThroughputSettings(requests=6, input_length=12, output_length=5)
    [row] = throughput.measure_baseline(baseline, replace(session, settings=settings))
    assert isinstance(row, throughput.ThroughputRow) and row.engine is None
    firsts = [first for _, first, _ in row.request_timings]
    assert len(set(firsts[:4])) == len(set(firsts[4:])) == 1 and firsts[0] < firsts[4]
    assert row.output_tokens_per_second * row.seconds == pytest.approx(30)


def test_a_baseline_supports_neither_rate_nor_concurrency(session: Session, baseline: BaselineModel) -> None:
    for settings in (ThroughputSettings(request_rate=1.0), ThroughputSettings(concurrency=1)):
        with pytest.raises(UsageError, match="whole batches"):
            next(throughput.measure_baseline(baseline, replace(session, settings=settings)))


def test_a_downsampled_timeline_keeps_its_last_point() -> None:
    timeline = [(float(second), 1, 0) for second in range(1001)]
    points = throughput._downsample(timeline)
    assert len(points) <= throughput.TIMELINE_POINTS + 1
    assert (points[0], points[-1]) == (timeline[0], timeline[-1])
    assert throughput._downsample(timeline[:1]) == (timeline[0],)


def test_the_region_baseline_changes_three_fields_of_the_recipe_and_runs_jit_programs() -> None:
    recipe = Recipe(model="m", region="layer", mode="default", batch_sizes=(2,))
    assert region_recipe(recipe) == Recipe(
        model="m", region="blocks", graphs="region", mode="reduce-overhead", programs="jit", batch_sizes=(2,)
    )


def test_restore_runs_before_each_step_and_is_not_timed() -> None:
    calls: list[str] = []

    def restore() -> None:
        calls.append("restore")
        Timestamps("cpu")
        sum(range(2_000_000))

    seconds = step_seconds("cpu", restore, lambda: calls.append("step"), repeats=3)
    assert calls == ["restore", "step"] * (3 + 2)
    assert len(seconds) == 3 and min(seconds) < 0.01
