"""Predicted times of steps: what a size costs, which size meets a target, and how measured times correct both."""

from __future__ import annotations

import math
from collections.abc import Sequence as ListLike

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcdeploy.engine.step_clock import StepClock, StepTotals
from tcdeploy.engine.step_costs import (
    CORRECTION_WEIGHT,
    MAX_CORRECTION,
    MIN_CORRECTION,
    StepCosts,
    StepEstimate,
    StepPredictor,
    make_step_costs,
)
from tcdeploy.planning.plan import make_plan
from tests.bundle.fake_caches import record_of
from tests.machines import LAPTOP, LLAMA_8B, make_recipe

DECODE = ((1, 5.0), (4, 6.0), (16, 8.0))
BUCKETS = StepCosts(((128, 7.0), (512, 12.0), (2048, 44.0)), DECODE, (128, 512, 2048))
LADDER = StepCosts(((128, 8.0), (512, 16.0)), DECODE, tuple(range(64, 513, 64)))


def test_a_step_costs_what_its_bucket_costs() -> None:
    assert [BUCKETS.predict_ms(tokens, 0) for tokens in (1, 128, 129, 512, 2048)] == [7.0, 7.0, 12.0, 12.0, 44.0]
    assert [BUCKETS.decode_ms(rows) for rows in (1, 2, 4, 5, 16)] == [5.0, 6.0, 6.0, 8.0, 8.0]


def test_a_step_size_between_two_measurements_is_interpolated() -> None:
    assert [LADDER.predict_ms(tokens, 0) for tokens in (128, 129, 192, 320)] == pytest.approx([8, 28 / 3, 28 / 3, 12])


def test_below_the_smallest_measurement_a_step_approaches_a_decode_step() -> None:
    costs = StepCosts(((101, 15.0),), DECODE, (1, 51, 101))
    assert [costs.predict_ms(tokens, 0) for tokens in (1, 51, 101)] == [5.0, 10.0, 15.0]


def test_decode_rows_add_their_attention_and_a_step_of_rows_only_is_a_decode_step() -> None:
    assert BUCKETS.predict_ms(100, 3) == 7.0 + 1.0
    assert BUCKETS.predict_ms(100, 16) == 7.0 + 3.0
    assert BUCKETS.predict_ms(16, 16) == 8.0


def test_a_size_that_was_interrupted_while_it_was_timed_gets_the_time_of_a_larger_one() -> None:
    costs = StepCosts(((128, 30.0), (512, 12.0)), DECODE, (128, 512))
    assert costs.predict_ms(100, 0) == 12.0 and costs.max_tokens(1, 20.0) == 512


@pytest.mark.parametrize(
    ("rows", "target_ms", "tokens"),
    [
        (1, 100.0, 2048),
        (1, 12.0, 512),
        (1, 11.9, 128),
        (16, 14.9, 128),
        (16, 15.0, 512),
        (1, 1.0, 128),
        (100, 1.0, 512),
    ],
)
def test_the_largest_size_that_meets_the_target_or_the_smallest_allowed_one(
    rows: int, target_ms: float, tokens: int
) -> None:
    assert BUCKETS.max_tokens(rows, target_ms) == tokens


def test_a_mixed_step_has_room_for_a_minimum_chunk_unless_no_size_is_as_large() -> None:
    assert [LADDER.max_tokens(rows, 0.1) for rows in (1, 32, 33, 500)] == [64, 64, 128, 512]


@st.composite
def step_costs(draw: st.DrawFn, largest: int = 300) -> StepCosts:
    """Measured times in no order, and at least as many step sizes as measurements."""
    times = st.floats(0.01, 100.0)
    measured = sorted(draw(st.sets(st.integers(1, largest), min_size=1, max_size=5)))
    rows = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=4)))
    sizes = sorted({*measured, *draw(st.sets(st.integers(1, measured[-1]), max_size=20))})
    return StepCosts(
        tuple((tokens, draw(times)) for tokens in measured),
        tuple((count, draw(times)) for count in rows),
        tuple(sizes),
        draw(st.integers(1, 40)),
    )


@given(costs=step_costs(), rows=st.integers(1, 64), target_ms=st.floats(0.01, 300.0))
def test_max_tokens_agrees_with_trying_every_size(costs: StepCosts, rows: int, target_ms: float) -> None:
    least = costs.min_tokens(rows)
    allowed = [size for size in costs.step_sizes if size >= least and size > rows]
    meeting = [size for size in allowed if costs.predict_ms(size, rows) <= target_ms]
    expected = meeting[-1] if meeting else least
    tokens = costs.max_tokens(rows, target_ms)
    assert tokens == expected or math.isclose(costs.predict_ms(max(tokens, expected), rows), target_ms)


@given(costs=step_costs(), rows=st.integers(0, 64))
def test_a_larger_step_never_costs_less(costs: StepCosts, rows: int) -> None:
    times = [costs.predict_ms(size, rows) for size in costs.step_sizes if size > rows]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("prefill", "decode", "sizes"),
    [
        ((), DECODE, (128,)),
        (((128, 7.0),), (), (128,)),
        (((128, 7.0),), DECODE, ()),
        (((512, 7.0), (128, 8.0)), DECODE, (128, 512)),
        (((128, 0.0),), DECODE, (128,)),
        (((128, math.nan),), DECODE, (128,)),
    ],
)
def test_invalid_tables_are_rejected(
    prefill: tuple[tuple[int, float], ...], decode: tuple[tuple[int, float], ...], sizes: ListLike[int]
) -> None:
    with pytest.raises(AssertionError):
        StepCosts(prefill, decode, tuple(sizes))


def test_costs_come_from_the_records_of_all_buckets() -> None:
    plan = make_plan(make_recipe(context=4096, buckets=(32, 64), batch_sizes=(1, 4)), LAPTOP, LLAMA_8B)
    times = {"prefill:32": 3.0, "prefill:64": 4.0, "decode:1": 1.0, "decode:4": 2.0}
    records = [record_of(name, step_ms=ms) for name, ms in times.items()]
    assert make_step_costs(plan, records) == StepCosts(((32, 3.0), (64, 4.0)), ((1, 1.0), (4, 2.0)), (32, 64))
    assert make_step_costs(plan, [*records[:3], record_of("decode:4")]) is None
    assert make_step_costs(plan, records[:3]) is None


def test_a_dynamic_program_has_many_step_sizes() -> None:
    plan = make_plan(make_recipe(context=4096, buckets=(40,), batch_sizes=(1,), shapes="dynamic"), LAPTOP, LLAMA_8B)
    costs = make_step_costs(plan, [record_of("prefill:2-40", step_ms=4.0), record_of("decode:1", step_ms=1.0)])
    assert costs is not None and costs.step_sizes == (16, 32, 40)
    assert 1.0 < costs.predict_ms(16, 0) < costs.predict_ms(17, 0) < costs.predict_ms(40, 0) == 4.0


# Corrections


def test_the_correction_follows_measured_times_and_changes_the_budget() -> None:
    predictor = StepPredictor(BUCKETS)
    assert predictor.max_tokens(1, 13.0) == 512
    for _ in range(200):
        predictor.observe(predictor.estimate(500, 1), 18.0)
    assert predictor.estimate(500, 1).predicted_ms == pytest.approx(18.0, rel=1e-3)
    assert predictor.max_tokens(1, 13.0) == 128
    assert predictor.estimate(4, 4) == ("decode", 6.0, 6.0), "each kind of step has its own correction"
    assert predictor.estimate(500, 0) == ("prefill", 12.0, 12.0)


@pytest.mark.parametrize(("measured_ms", "limit"), [(1e6, MAX_CORRECTION), (1e-6, MIN_CORRECTION)])
def test_one_interrupted_step_changes_little_and_many_stay_within_limits(measured_ms: float, limit: float) -> None:
    predictor = StepPredictor(BUCKETS)
    predictor.observe(predictor.estimate(500, 1), measured_ms)
    assert predictor.corrections["mixed"] == pytest.approx(1 + CORRECTION_WEIGHT * (limit - 1))
    for _ in range(1000):
        predictor.observe(predictor.estimate(500, 1), measured_ms)
    assert predictor.corrections["mixed"] == pytest.approx(limit)


# Measured times

DECODE_STEP = StepEstimate("decode", 5.0, 5.5)


def test_a_step_is_measured_between_two_completions_that_the_host_waited_for() -> None:
    clock = StepClock(StepPredictor(BUCKETS))
    clock.step_completed(DECODE_STEP, 10.0, has_waited=True, is_next_launched=True)
    assert clock.totals["decode"] == StepTotals(), "the device may have been idle before the first step"
    clock.step_completed(DECODE_STEP, 10.006, has_waited=True, is_next_launched=False)
    steps, predicted, measured = clock.totals["decode"]
    assert (steps, predicted, measured) == (1, pytest.approx(0.0055), pytest.approx(0.006))
    assert clock.predictor.corrections["decode"] == pytest.approx(1 + CORRECTION_WEIGHT * 0.2)
    clock.step_completed(DECODE_STEP, 11.0, has_waited=True, is_next_launched=True)
    assert clock.totals["decode"].steps == 1, "the device was idle in between"


@pytest.mark.parametrize("late", [0, 1])
def test_a_step_is_not_measured_if_the_host_was_late_at_its_beginning_or_end(late: int) -> None:
    clock = StepClock(StepPredictor(BUCKETS))
    for number in range(2):
        clock.step_completed(DECODE_STEP, 10.0 + number, has_waited=number != late, is_next_launched=True)
    assert clock.totals["decode"].steps == 0
    clock.step_completed(DECODE_STEP, 12.0, has_waited=True, is_next_launched=True)
    clock.step_completed(DECODE_STEP, 13.0, has_waited=True, is_next_launched=True)
    assert clock.totals["decode"].steps == (2 if late == 0 else 1)


def test_a_step_without_an_estimate_is_not_measured_and_starts_the_next_one() -> None:
    clock = StepClock(StepPredictor(BUCKETS))
    clock.step_completed(DECODE_STEP, 10.0, has_waited=True, is_next_launched=True)
    clock.step_completed(None, 10.5, has_waited=True, is_next_launched=True)
    clock.step_completed(DECODE_STEP, 10.51, has_waited=True, is_next_launched=True)
    assert clock.totals["decode"].steps == 1 and clock.totals["decode"].measured_seconds == pytest.approx(0.01)
