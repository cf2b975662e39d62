"""Predicted times of steps: how they depend on size and context, and how measured times correct them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tcdeploy.engine.schedule.step_costs import (
    CORRECTION_WEIGHT,
    MAX_CORRECTION,
    MIN_CORRECTION,
    MIN_DECODE_SHARE,
    StepClock,
    StepCosts,
    StepEstimate,
    StepPredictor,
    StepTotals,
)

DECODE = ((1, 5.0), (4, 6.0), (16, 8.0))
BUCKETS = StepCosts(((128, 7.0), (512, 12.0), (2048, 44.0)), DECODE)
SIZES = (128, 512, 2048)
# decode steps were timed with 100 tokens of context in each row
CONTEXT = StepCosts(BUCKETS.prefill_ms, DECODE, 100, decode_context_ms=0.01, prefix_pair_ms=0.001, prefix_token_ms=0.02)


def make_predictor(costs: StepCosts = BUCKETS, sizes: tuple[int, ...] = SIZES) -> StepPredictor:
    return StepPredictor(costs, lambda rows: sizes)


def table_ms(tokens: int, rows: int, row_context: int = 0, prefix_pairs: int = 0, prefix: int = 0) -> float:
    return make_predictor(CONTEXT).estimate(tokens, rows, row_context, prefix_pairs, prefix).table_ms


def test_a_step_costs_what_the_size_costs_to_which_it_is_padded() -> None:
    predictor = make_predictor()
    times = [predictor.estimate(tokens, 0).table_ms for tokens in (1, 128, 129, 512, 2048)]
    assert times == [7.0, 7.0, 12.0, 12.0, 44.0]
    assert [BUCKETS.decode_ms(rows) for rows in (1, 2, 4, 5, 16)] == [5.0, 6.0, 6.0, 8.0, 8.0]


def test_a_size_between_two_measurements_is_interpolated() -> None:
    costs = StepCosts(((128, 8.0), (512, 16.0)), DECODE)
    assert [costs.size_ms(size) for size in (128, 192, 320, 512, 600)] == pytest.approx([8, 28 / 3, 12, 16, 16])


def test_below_the_smallest_measurement_a_size_approaches_a_decode_step() -> None:
    costs = StepCosts(((101, 15.0),), DECODE)
    assert [costs.size_ms(size) for size in (1, 51, 101)] == [5.0, 10.0, 15.0]
    assert StepCosts(((101, 3.0),), DECODE).size_ms(1) == 3.0, "a decode step that took longer is not used"


def test_a_size_that_takes_longer_than_a_larger_one_is_slow_unless_the_difference_is_small() -> None:
    costs = StepCosts(((64, 10.0), (128, 16.0), (192, 12.2), (256, 12.0), (512, 20.0)), DECODE)
    assert costs.slow_sizes == {128}
    assert costs.with_prefill_ms(1024, 11.0).slow_sizes == {128, 192, 256, 512}
    assert StepCosts(((512, 12.0),), DECODE).slow_sizes == frozenset()


def test_the_time_of_another_size_is_added_in_order() -> None:
    costs = BUCKETS.with_prefill_ms(256, 9.0)
    assert costs.prefill_ms == ((128, 7.0), (256, 9.0), (512, 12.0), (2048, 44.0))
    assert costs.size_ms(256) == 9.0
    assert costs.with_prefill_ms(256, 8.0).prefill_ms == ((128, 7.0), (256, 8.0), (512, 12.0), (2048, 44.0))
    assert costs.decode_ms_by_rows == DECODE


def test_a_size_that_was_interrupted_while_it_was_timed_gets_the_time_of_a_larger_one() -> None:
    costs = StepCosts(((128, 30.0), (512, 12.0)), DECODE)
    assert [costs.size_ms(size) for size in (128, 300, 512)] == [12.0] * 3


def test_a_step_of_rows_only_is_a_decode_step_and_with_prompts_it_has_the_size_of_both() -> None:
    estimates = [make_predictor().estimate(tokens, rows) for tokens, rows in ((16, 16), (17, 16), (17, 0), (129, 1))]
    assert [(kind, ms) for kind, ms, _ in estimates] == [
        ("decode", 8.0), ("mixed", 7.0), ("prefill", 7.0), ("mixed", 12.0),
    ]  # fmt: skip


# Context


def test_a_decode_step_costs_the_context_beyond_that_of_the_timed_step() -> None:
    assert CONTEXT.decode_ms(4) == CONTEXT.decode_ms(4, 400) == 6.0
    assert CONTEXT.decode_ms(4, 500) == pytest.approx(7.0)
    assert CONTEXT.decode_ms(4, 300) == pytest.approx(5.0)
    assert CONTEXT.decode_ms(3, 300) == pytest.approx(5.0), "the timed step had four rows"
    assert table_ms(4, 4, 500) == pytest.approx(7.0)


def test_a_decode_step_costs_at_least_a_share_of_the_timed_one() -> None:
    assert CONTEXT.decode_ms(16, 0) == MIN_DECODE_SHARE * 8.0


def test_a_prefill_or_mixed_step_costs_the_context_of_its_rows_and_of_its_chunks() -> None:
    assert table_ms(100, 0) == 7.0
    assert table_ms(100, 0, prefix_pairs=2000) == pytest.approx(9.0)
    assert table_ms(100, 4, 300) == pytest.approx(10.0)
    assert table_ms(100, 4, 300, 2000) == pytest.approx(12.0)


def test_attention_to_a_prefix_has_a_part_that_does_not_depend_on_the_chunk() -> None:
    """A prefix of 500 tokens takes 10 + 5 ms with a chunk of 10 tokens, and 10 + 50 ms with one of 100."""
    assert table_ms(10, 0, 0, 10 * 500, 500) == pytest.approx(7.0 + 10.0 + 5.0)
    assert table_ms(100, 0, 0, 100 * 500, 500) == pytest.approx(7.0 + 10.0 + 50.0)
    assert table_ms(14, 4, 300, 10 * 500, 500) == pytest.approx(7.0 + 3.0 + 10.0 + 5.0), (
        "the context of the rows adds 3 ms"
    )


@st.composite
def step_costs(draw: st.DrawFn) -> StepCosts:
    """Measured times in no order."""
    times = st.floats(0.01, 100.0)
    measured = sorted(draw(st.sets(st.integers(1, 300), min_size=1, max_size=5)))
    rows = sorted(draw(st.sets(st.integers(1, 64), min_size=1, max_size=4)))
    return StepCosts(
        tuple((tokens, draw(times)) for tokens in measured),
        tuple((count, draw(times)) for count in rows),
        draw(st.integers(0, 500)),
        draw(st.sampled_from([0.0, 0.001, 0.1])),
        draw(st.sampled_from([0.0, 1e-5, 0.01])),
        draw(st.sampled_from([0.0, 0.001, 0.1])),
    )


@given(costs=step_costs(), size=st.integers(1, 400), contexts=st.tuples(*[st.integers(0, 9999)] * 3))
def test_a_larger_step_or_more_context_never_costs_less(
    costs: StepCosts, size: int, contexts: tuple[int, int, int]
) -> None:
    ms = costs.mixed_ms(size, *contexts)
    for number in range(4):
        arguments = [size, *contexts]
        arguments[number] += 9
        larger_ms = costs.mixed_ms(*arguments)
        assert larger_ms >= ms or math.isclose(larger_ms, ms)
    assert 0 < costs.decode_ms(size, contexts[0]) <= costs.decode_ms(size, contexts[0] + 9)


@pytest.mark.parametrize(
    ("prefill", "decode", "factors"),
    [
        ((), DECODE, {}),
        (((128, 7.0),), (), {}),
        (((512, 7.0), (128, 8.0)), DECODE, {}),
        (((128, 7.0), (128, 8.0)), DECODE, {}),
        (((0, 7.0),), DECODE, {}),
        (((128, 7.0),), ((4, 5.0), (1, 6.0)), {}),
        (((128, 0.0),), DECODE, {}),
        (((128, math.nan),), DECODE, {}),
        (((128, 7.0),), ((1, math.inf),), {}),
        (((128, 7.0),), DECODE, {"decode_context_ms": -0.1}),
        (((128, 7.0),), DECODE, {"prefix_pair_ms": math.nan}),
        (((128, 7.0),), DECODE, {"prefix_pair_ms": math.inf}),
        (((128, 7.0),), DECODE, {"prefix_token_ms": -0.1}),
    ],
)
def test_invalid_tables_are_rejected(prefill: Any, decode: Any, factors: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        StepCosts(prefill, decode, **factors)


# Sizes


def test_a_step_is_padded_to_the_smallest_size_that_holds_it_or_the_largest() -> None:
    assert [make_predictor().padded_size(tokens, 0) for tokens in (1, 128, 129, 2048, 9999)] == [
        128, 128, 512, 2048, 2048,
    ]  # fmt: skip


def test_sizes_depend_on_the_rows_and_are_asked_for_at_each_step() -> None:
    sizes = {0: (128, 2048), 4: (2048,)}
    predictor = StepPredictor(BUCKETS, sizes.__getitem__)
    assert [predictor.estimate(100, rows).table_ms for rows in (0, 4)] == [7.0, 44.0]
    sizes[4] = (512, 2048)
    assert predictor.estimate(100, 4).table_ms == 12.0


def test_a_decode_step_that_was_interrupted_while_it_was_timed_gets_the_time_of_a_larger_one() -> None:
    costs = StepCosts(((128, 7.0),), ((1, 350.0), (4, 6.0), (16, 8.0)))
    assert [costs.decode_ms(rows) for rows in (1, 2, 16)] == [6.0, 6.0, 8.0]


# Corrections


def test_the_correction_of_a_kind_of_step_follows_its_measured_times() -> None:
    predictor = make_predictor()
    for _ in range(200):
        predictor.observe(predictor.estimate(500, 1), 18.0)
    assert predictor.estimate(500, 1) == ("mixed", 12.0, pytest.approx(18.0, rel=1e-3))
    assert predictor.estimate(4, 4) == ("decode", 6.0, 6.0), "each kind of step has its own correction"
    assert predictor.estimate(500, 0) == ("prefill", 12.0, 12.0)


@pytest.mark.parametrize(("measured_ms", "limit"), [(1e6, MAX_CORRECTION), (1e-6, MIN_CORRECTION)])
def test_one_interrupted_step_changes_little_and_many_stay_within_limits(measured_ms: float, limit: float) -> None:
    predictor = make_predictor()
    predictor.observe(predictor.estimate(500, 1), measured_ms)
    assert predictor.corrections["mixed"] == pytest.approx(1 + CORRECTION_WEIGHT * (limit - 1))
    for _ in range(1000):
        predictor.observe(predictor.estimate(500, 1), measured_ms)
    assert predictor.corrections["mixed"] == pytest.approx(limit)


# Measured times

DECODE_STEP = StepEstimate("decode", 5.0, 5.5)


def test_a_step_is_measured_between_two_completions_that_the_host_waited_for() -> None:
    clock = StepClock(make_predictor())
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
    clock = StepClock(make_predictor())
    for number in range(2):
        clock.step_completed(DECODE_STEP, 10.0 + number, has_waited=number != late, is_next_launched=True)
    assert clock.totals["decode"].steps == 0
    clock.step_completed(DECODE_STEP, 12.0, has_waited=True, is_next_launched=True)
    clock.step_completed(DECODE_STEP, 13.0, has_waited=True, is_next_launched=True)
    assert clock.totals["decode"].steps == (2 if late == 0 else 1)


def test_a_step_without_an_estimate_is_not_measured_and_starts_the_next_one() -> None:
    clock = StepClock(make_predictor())
    clock.step_completed(DECODE_STEP, 10.0, has_waited=True, is_next_launched=True)
    clock.step_completed(None, 10.5, has_waited=True, is_next_launched=True)
    clock.step_completed(DECODE_STEP, 10.51, has_waited=True, is_next_launched=True)
    assert clock.totals["decode"].steps == 1 and clock.totals["decode"].measured_seconds == pytest.approx(0.01)


def test_the_start_of_the_step_in_flight_is_known_if_the_host_waited_for_the_previous_one() -> None:
    clock, starts = StepClock(make_predictor()), []
    for now, has_waited, is_next_launched in ((1.0, True, True), (2.0, False, True), (3.0, True, False)):
        clock.step_completed(DECODE_STEP, now, has_waited, is_next_launched)
        starts.append(clock.started)
    assert starts == [1.0, None, None]
