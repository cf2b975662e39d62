"""When the next launch is due, and how late launches change the margin before the predicted end of a step."""

from __future__ import annotations

import pytest

from tcdeploy.engine.schedule.step_costs import StepClock, StepCosts, StepEstimate, StepPredictor
from tcdeploy.engine.step.launch_timer import (
    FIRST_STEP_MARGIN_SHARE,
    GROWTH,
    LAUNCH_TIME_DECAY,
    MARGIN_SHARE,
    MAX_MARGIN_MS,
    MAX_PAUSE,
    MAX_ROWS,
    MIN_MARGIN_MS,
    MIN_PAUSE,
    SHRINKAGE,
    LaunchTimer,
)


def timer_of_a_step(start: float | None = 100.0, predicted_ms: float | None = 20.0) -> LaunchTimer:
    timer = LaunchTimer()
    timer.step_started(start, predicted_ms)
    return timer


def launched(timer: LaunchTimer, *were_late: bool) -> list[float]:
    """The margin after each of these launches, which take 0 ms."""
    margins = []
    for was_late in were_late:
        timer.launched(0.0, was_late, has_prompts=False)
        margins.append(timer.margin_ms)
    return margins


def test_a_launch_is_due_a_margin_before_the_predicted_end_of_the_step_in_flight() -> None:
    timer = timer_of_a_step()
    margin_ms = MIN_MARGIN_MS + MARGIN_SHARE * 20
    assert timer.due(False) == pytest.approx(100.0 + 0.020 - margin_ms / 1e3)


def test_the_first_step_after_the_device_was_idle_has_a_larger_margin() -> None:
    timer = LaunchTimer()
    timer.step_started(100.0, 20.0, is_first=True)
    assert timer.due(False) == pytest.approx(100.0 + 0.020 - (MIN_MARGIN_MS + FIRST_STEP_MARGIN_SHARE * 20) / 1e3)
    assert FIRST_STEP_MARGIN_SHARE > MARGIN_SHARE


def test_a_launch_is_due_earlier_by_the_longest_recent_launch() -> None:
    timer = timer_of_a_step()
    due, launches = timer.due(False), []
    for seconds in (0.002, 0.001, 0.003):
        timer.launched(seconds, was_late=False, has_prompts=False)
        launches.append(timer.launch_ms[False])
    assert launches == pytest.approx([2.0, 2.0 * LAUNCH_TIME_DECAY, 3.0])
    timer.step_started(100.0, 20.0)
    assert due is not None and timer.due(False) == pytest.approx(due - 0.003)
    for _ in range(500):
        timer.launched(0.001, was_late=False, has_prompts=False)
    assert timer.launch_ms[False] == pytest.approx(1.0)


def test_launches_with_prompts_have_a_duration_of_their_own() -> None:
    timer = timer_of_a_step()
    due = timer.due(False)
    timer.launched(0.001, was_late=False, has_prompts=False)
    timer.launched(0.004, was_late=False, has_prompts=True)
    timer.step_started(100.0, 20.0)
    assert due is not None
    assert [timer.due(has_prompts) for has_prompts in (False, True)] == pytest.approx([due - 0.001, due - 0.004])


@pytest.mark.parametrize(("had_prompts", "has_prompts"), [(False, False), (False, True), (True, True), (True, False)])
def test_a_late_launch_for_a_prompt_that_has_just_arrived_does_not_change_the_margin(
    had_prompts: bool, has_prompts: bool
) -> None:
    """It was planned as a launch without prompts, which takes less time."""
    timer = LaunchTimer()
    timer.step_started(100.0, 20.0, has_prompts=had_prompts)
    timer.launched(0.0, was_late=True, has_prompts=has_prompts)
    assert timer.late_launches == 1
    is_tested = had_prompts or not has_prompts
    assert (timer.margin_ms > MIN_MARGIN_MS) == is_tested
    timer.step_started(100.0, 20.0)
    assert (timer.due(False) is None) == is_tested, "a pause follows"


def test_the_time_of_a_launch_counts_without_a_due_time() -> None:
    timer = LaunchTimer()
    timer.launched(0.002, was_late=True, has_prompts=False)
    assert (timer.launch_ms[False], timer.late_launches) == (pytest.approx(2.0), 0)


@pytest.mark.parametrize(("start", "predicted_ms"), [(None, 20.0), (100.0, None), (None, None)])
def test_a_launch_is_due_at_once_if_the_end_of_the_step_is_not_known(
    start: float | None, predicted_ms: float | None
) -> None:
    assert LaunchTimer().due(False) is None, "before the first step"
    assert timer_of_a_step(start, predicted_ms).due(False) is None
    timer = timer_of_a_step()
    timer.step_started(start, predicted_ms)
    assert timer.due(False) is None, "the previous due time is not kept"


def test_a_step_that_began_at_zero_and_takes_no_time_has_a_due_time() -> None:
    timer = timer_of_a_step(0.0, 0.0)
    assert timer.due(False) == pytest.approx(-MIN_MARGIN_MS / 1e3)


def test_each_late_launch_makes_the_next_one_due_earlier_up_to_a_limit() -> None:
    timer = timer_of_a_step()
    due = timer.due(False)
    assert launched(timer, True, True) == pytest.approx([MIN_MARGIN_MS * GROWTH, MIN_MARGIN_MS * GROWTH**2])
    assert timer.due(False) == due, "the launch of the step in flight has happened"
    resumed_after_pause(timer)
    assert due is not None and timer.due(False) == pytest.approx(due - (timer.margin_ms - MIN_MARGIN_MS) / 1e3)
    assert launched(timer, *[True] * 20)[-1] == MAX_MARGIN_MS
    assert timer.late_launches == 22


def resumed_after_pause(timer: LaunchTimer) -> int:
    """Launch steps until one is delayed again; returns how many were launched at once."""
    for number in range(1000):
        timer.step_started(100.0, 20.0)
        if timer.due(False) is not None:
            return number
        timer.launched(0.0, was_late=True, has_prompts=False)
    raise AssertionError("no launch is delayed again")


def test_after_a_late_launch_steps_are_launched_at_once_and_more_of_them_while_launches_remain_late() -> None:
    timer = timer_of_a_step()
    pauses = []
    for _ in range(9):
        launched(timer, True)
        pauses.append(resumed_after_pause(timer))
    assert pauses == [4, 8, 16, 32, 64, 128, 256, 256, 256] and (pauses[0], pauses[-1]) == (MIN_PAUSE, MAX_PAUSE)
    launched(timer, *[False] * 1000, True)
    assert resumed_after_pause(timer) == MIN_PAUSE


def test_with_many_rows_steps_are_launched_at_once() -> None:
    timer = LaunchTimer()
    timer.step_started(100.0, 20.0, rows=MAX_ROWS)
    assert timer.due(False) is not None
    timer.step_started(100.0, 20.0, rows=MAX_ROWS + 1)
    assert timer.due(False) is None


def run_steps(actual_ms: float, table_ms: float, steps: int = 2000) -> tuple[float, LaunchTimer, StepClock]:
    """Milliseconds per step on a simulated device with steps of `actual_ms`; a launch takes 0.5 ms.

    The order of calls is that of Engine._launch_and_collect.
    """
    clock = StepClock(StepPredictor(StepCosts(((512, 2 * table_ms),), ((8, table_ms),)), lambda rows: (512,)))
    timer, now, free = LaunchTimer(), 0.0, 0.0
    in_flight: tuple[float, StepEstimate] | None = None
    for _ in range(steps):
        now = max(now, timer.due(False) or 0.0)
        start, now = now, now + 0.0005
        estimate = clock.predictor.estimate(8, 8)
        free = max(free, now) + actual_ms / 1e3
        previous, in_flight = in_flight, (free, estimate)
        if previous is None:
            timer.step_started(start, estimate.predicted_ms, 8, is_first=True)
            continue
        end, previous_estimate = previous
        timer.launched(now - start, was_late=end <= now, has_prompts=False)
        has_waited, now = end > now, max(now, end)
        clock.step_completed(previous_estimate, now, has_waited, is_next_launched=True)
        timer.step_started(clock.started, estimate.predicted_ms, 8)
    return 1e3 * now / steps, timer, clock


@pytest.mark.parametrize(("actual_ms", "table_ms"), [(20, 20), (20, 30), (20, 39), (40, 60), (6, 9), (200, 225)])
def test_a_prediction_that_is_too_long_is_corrected_and_costs_no_time(actual_ms: float, table_ms: float) -> None:
    """Without pauses, each second launch was late for ever, and no step was measured."""
    ms, timer, clock = run_steps(actual_ms, table_ms)
    assert ms == pytest.approx(actual_ms, rel=0.01)
    assert clock.predictor.corrections["decode"] == pytest.approx(actual_ms / table_ms, rel=0.02)
    assert timer.late_launches < 20
    assert timer.due(False) is not None, "launches are delayed again"


def test_a_prediction_beyond_the_limit_of_corrections_costs_little() -> None:
    ms, _, clock = run_steps(6, 300)
    assert ms < 1.5 * 6 and clock.predictor.corrections["decode"] == pytest.approx(0.5, rel=0.02)


def test_launches_in_time_shrink_the_margin_slowly_down_to_a_limit() -> None:
    timer = timer_of_a_step()
    launched(timer, True, True)
    largest = timer.margin_ms
    assert launched(timer, False, False) == pytest.approx([largest * SHRINKAGE, largest * SHRINKAGE**2])
    assert launched(timer, *[False] * 2000)[-1] == MIN_MARGIN_MS
    assert timer.late_launches == 2, "launches in time are not counted"


def test_one_late_launch_outweighs_many_in_time() -> None:
    timer = timer_of_a_step()
    assert launched(timer, True, *[False] * 30)[-1] > MIN_MARGIN_MS


def test_a_launch_without_a_due_time_is_neither_counted_nor_changes_the_margin() -> None:
    timer = timer_of_a_step()
    launched(timer, True, True)
    margin_ms = timer.margin_ms
    timer.step_started(None, None)
    assert launched(timer, True, False) == [margin_ms] * 2
    assert timer.late_launches == 2
