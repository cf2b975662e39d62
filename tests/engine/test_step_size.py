"""The size of a mixed step: examples computed by hand, and random ones compared with an exhaustive search.

The times of the random examples are multiples of 1/1024 ms, and corrections are powers of two. So all sums are exact,
and both implementations agree on ties.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tcdeploy.engine.schedule.step_costs import StepCosts, StepPredictor
from tcdeploy.engine.schedule.step_size import (
    FIRST_TOKEN_WEIGHT,
    MAX_TARGET_FACTOR,
    MIN_CHUNK_TOKENS,
    SMALLEST_STEP_FACTOR,
    Backlog,
    choose_step_tokens,
    target_factor,
)
from tcdeploy.planning.attention import ITL_TARGET_DECODE_STEPS

NO_TARGET = 1e9
H100_8B = StepCosts(  # measured on an 8B shape on one H100
    ((128, 7.7), (512, 12.4), (1024, 22.3), (2048, 44.2)),
    ((1, 5.38), (4, 5.56), (16, 5.93), (32, 6.42), (128, 9.95), (256, 13.85)),
)
H100_SIZES = tuple(range(64, 2049, 64))


def size_on_h100(rows: int, prompts: int, tokens: int, target_ms: float | None = None) -> int:
    predictor = StepPredictor(H100_8B, lambda rows: H100_SIZES)
    return choose_step_tokens(predictor, Backlog(rows, 0, prompts, tokens, 0), target_ms)


def size_of(
    rows: int = 1,
    prompts: int = 1,
    tokens: int = 1000,
    target_ms: float | None = NO_TARGET,
    *,
    row_context: int = 0,
    prefix: int = 0,
    min_chunk: int = 4,
    corrections: dict[str, float] | None = None,
) -> int:
    """The chosen size. Sizes of 16, 32, 48 and 64 tokens take 10, 13, 16 and 19 ms: a larger one takes less per token.

    Decode steps take 4.5, 5.5 and 6.5 ms with up to 1, 4 and 8 rows.
    """
    costs = StepCosts(
        ((16, 10.0), (64, 19.0)), ((1, 4.5), (4, 5.5), (8, 6.5)), decode_context_ms=0.01, prefix_pair_ms=0.001
    )
    predictor = StepPredictor(costs, lambda rows: (16, 32, 48, 64))
    predictor.corrections.update(corrections or {})
    backlog = Backlog(rows, row_context, prompts, tokens, prefix)
    return choose_step_tokens(predictor, backlog, target_ms, min_chunk)


# The sum


@pytest.mark.parametrize(
    ("rows", "prompts", "row_context", "size"),
    [
        (2, 1, 0, 64),  # 20 * 19 + 2 * 10 = 400 is less than 20 * (10 + 10) + 2 * (1 + 1) = 404
        (4, 1, 0, 32),  # 20 * 19 + 4 * 10 = 420 is more than 20 * (10 + 10) + 4 * (1 + 1) = 408
        (4, 2, 0, 64),  # 40 * 19 + 4 * 10 = 800 is less than 40 * (10 + 10) + 4 * (1 + 1) = 808
        (4, 1, 100, 64),  # 20 * 20 + 4 * 10 = 440 is less than 20 * (11 + 11) + 4 * (1 + 1) = 448
    ],
)
def test_few_rows_many_prompts_or_a_long_context_of_the_rows_lead_to_large_steps(
    rows: int, prompts: int, row_context: int, size: int
) -> None:
    """56 tokens: one step of 19 ms, or two steps of 10 ms. A decode step takes 9 ms. A context of 100 adds 1 ms."""
    assert FIRST_TOKEN_WEIGHT == 20
    costs = StepCosts(((32, 10.0), (64, 19.0)), ((4, 9.0),), decode_context_ms=0.01)
    predictor = StepPredictor(costs, lambda rows: (32, 64))
    assert choose_step_tokens(predictor, Backlog(rows, row_context, prompts, 56, 0), NO_TARGET, 4) == size


def test_the_last_step_of_the_prompts_is_a_smaller_one() -> None:
    """257 tokens with one row: 256 and 1 take 20 + 4 ms, and 512 takes 30 ms."""
    predictor = StepPredictor(
        StepCosts(((32, 4.0), (257, 20.0), (512, 30.0)), ((1, 3.0),)), lambda rows: (32, 257, 512)
    )
    assert choose_step_tokens(predictor, Backlog(1, 0, 1, 257, 0), NO_TARGET) == 257
    assert choose_step_tokens(predictor, Backlog(1, 0, 1, 300, 0), NO_TARGET) == 512, "44 tokens would take 20 ms more"


@pytest.mark.parametrize(
    ("rows", "prompts", "size"), [(1, 1, 640), (32, 1, 640), (128, 1, 192), (128, 16, 768), (256, 1, 320)]
)
def test_a_prompt_of_600_tokens_is_computed_at_once_unless_many_rows_wait(rows: int, prompts: int, size: int) -> None:
    assert size_on_h100(rows, prompts, 600) == size


def test_a_prompt_beside_others_may_lead_to_a_smaller_step_since_it_brings_tokens() -> None:
    """1,500 tokens fit in two steps of 768, but 1,600 do not. More prompts with as many tokens never shrink a step."""
    assert size_on_h100(8, 1, 1500) == size_on_h100(8, 2, 1500) == 768
    assert size_on_h100(8, 2, 1600) == 576


# The limits


def test_a_step_is_not_larger_than_the_prompts_need() -> None:
    assert [size_of(tokens=tokens) for tokens in (1, 15, 16, 31, 32, 63, 64)] == [16, 16, 32, 32, 48, 64, 64]


@pytest.mark.parametrize(("target_ms", "size"), [(1e3, 64), (19.0, 64), (18.9, 48), (13.0, 32), (12.9, 16), (1.0, 16)])
def test_a_step_meets_the_target_or_has_the_smallest_size(target_ms: float, size: int) -> None:
    assert size_of(target_ms=target_ms) == size


@pytest.mark.parametrize(("min_chunk", "size"), [(1, 16), (13, 16), (14, 32), (29, 32), (61, 64), (500, 64)])
def test_a_step_has_room_for_a_small_chunk_whatever_the_target(min_chunk: int, size: int) -> None:
    assert size_of(rows=3, target_ms=0.1, min_chunk=min_chunk) == size


def test_a_step_that_holds_all_prompts_may_be_smaller_than_a_minimum_chunk() -> None:
    assert size_of(rows=3, tokens=10, target_ms=0.1, min_chunk=40) == 16


def test_the_minimum_chunk_has_a_default() -> None:
    least = 5 + MIN_CHUNK_TOKENS
    costs = StepCosts(((least, 10.0), (4 * least, 40.0)), ((8, 5.0),))
    predictor = StepPredictor(costs, lambda rows: (least - 1, least, 4 * least))
    assert choose_step_tokens(predictor, Backlog(5, 0, 1, 1000, 0), 0.1) == least


@pytest.mark.parametrize(("rows", "size"), [(1, 32), (2, 48), (4, 48), (5, 64), (8, 64)])
def test_the_default_target_is_a_multiple_of_the_decode_step_of_the_same_rows(rows: int, size: int) -> None:
    """Decode steps take 4.5, 5.5 and 6.5 ms, so the target is 13.5, 16.5 or 19.5 ms."""
    assert ITL_TARGET_DECODE_STEPS == 3
    assert size_of(rows=rows, target_ms=None) == size


@pytest.mark.parametrize(("rows", "prompts", "size"), [(4, 4, 48), (4, 5, 64), (1, 1, 32), (1, 2, 64)])
def test_the_default_target_is_larger_if_there_are_more_prompts_than_rows(rows: int, prompts: int, size: int) -> None:
    """Before scaling it is 16.5 ms with 4 rows, and 13.5 ms with 1. A step of 64 tokens takes 19 ms."""
    assert size_of(rows=rows, prompts=prompts, target_ms=None) == size
    assert size_of(rows=rows, prompts=prompts, target_ms=13.5) == 32, "a given target is kept"


def test_the_factor_of_the_default_target_is_limited() -> None:
    assert [target_factor(prompts, 10) for prompts in (1, 10, 15, 20, 200)] == [1.0, 1.0, 1.5, 2.0, MAX_TARGET_FACTOR]


def test_the_default_target_counts_the_context_of_the_rows() -> None:
    """300 tokens of context: a decode step takes 7.5 ms, and a step of 64 tokens 22 ms, less than 22.5."""
    assert size_of(target_ms=None) == 32
    assert size_of(target_ms=None, row_context=300) == 64


def test_the_context_of_the_rows_is_part_of_the_predicted_time() -> None:
    assert [size_of(target_ms=19.0, row_context=context) for context in (0, 300, 301, 600)] == [64, 48, 32, 32]


def test_corrections_change_the_predicted_time_and_the_default_target() -> None:
    assert size_of(target_ms=16.0) == 48
    assert size_of(target_ms=16.0, corrections={"mixed": 1.25}) == 16, "13 ms would be 16.25"
    assert size_of(target_ms=16.0, corrections={"mixed": 0.5}) == 64
    assert size_of(target_ms=16.0, corrections={"decode": 2.0, "prefill": 2.0}) == 48
    assert size_of(target_ms=None) == 32
    assert size_of(target_ms=None, corrections={"decode": 1.5}) == 64
    assert size_of(target_ms=None, corrections={"decode": 1.5, "mixed": 1.5}) == 32


def test_a_long_prefix_makes_steps_smaller() -> None:
    """A prefix of 100 tokens adds 0.1 ms for each token of the chunk: 6.3 ms to a step of 64 tokens."""
    sizes = [size_of(target_ms=19.0, prefix=prefix) for prefix in (0, 1, 63, 64, 193, 194, 9999)]
    assert sizes == [64, 48, 48, 32, 32, 16, 16]


@pytest.mark.parametrize(("prefix", "size"), [(50, 64), (51, 48), (200, 48), (500, 32), (1000, 48), (1800, 64)])
def test_if_the_smallest_step_takes_about_as_long_as_the_target_a_step_may_take_a_little_longer(
    prefix: int, size: int
) -> None:
    """Each step takes 1 ms per 50 tokens of the prefix, whatever its size. The target is 20 ms.

    With 200 tokens, the four sizes take 14, 17, 20 and 23 ms. With 500 they take 20, 23, 26 and 29 ms, and up to 24 is
    allowed. With 1,000 up to 36 is allowed, which 48 tokens take, and with 1,800 up to 55.2.
    """
    costs = StepCosts(((16, 10.0), (64, 19.0)), ((1, 4.5),), prefix_token_ms=0.02)
    predictor = StepPredictor(costs, lambda rows: (16, 32, 48, 64))
    assert choose_step_tokens(predictor, Backlog(1, 0, 1, 1000, prefix), 20.0, 4) == size


def test_sizes_whose_graphs_are_captured_between_two_steps_are_used_at_once() -> None:
    sizes = [2048]
    predictor = StepPredictor(H100_8B, lambda rows: tuple(sizes))
    chosen = []
    for captured in (1024, 640, 512, 128):
        chosen.append(choose_step_tokens(predictor, Backlog(1, 0, 1, 600, 0), None))
        sizes.insert(0, captured)
    assert chosen == [2048, 1024, 640, 640]
    assert choose_step_tokens(predictor, Backlog(1, 0, 1, 100, 0), None) == 128


def test_sizes_are_those_of_the_number_of_rows() -> None:
    predictor = StepPredictor(H100_8B, lambda rows: (128, 256, 2048) if rows <= 4 else (256, 2048))
    assert [choose_step_tokens(predictor, Backlog(rows, 0, 1, 90, 0), None) for rows in (4, 5)] == [128, 256]


# Random backlogs


class Choice(NamedTuple):
    """The arguments of choose_step_tokens."""

    predictor: StepPredictor
    backlog: Backlog
    target_ms: float | None
    min_chunk: int

    def size(self) -> int:
        return choose_step_tokens(*self)

    def changed(self, **changes: int) -> Choice:
        return self._replace(backlog=self.backlog._replace(**changes))

    def sizes(self) -> tuple[int, ...]:
        return self.predictor.step_sizes(self.backlog.rows)

    def smallest_holding(self, prompt_tokens: int) -> int:
        """The smallest size with so many prompt tokens, or the largest size."""
        sizes = self.sizes()
        return min((size for size in sizes if size - self.backlog.rows >= prompt_tokens), default=max(sizes))

    def meets_target(self, size: int) -> bool:
        """Whether the predicted time is within the limit, if one chunk fills the step."""
        rows, row_context = self.backlog.rows, self.backlog.row_context
        target_ms = self.target_ms
        if target_ms is None:
            target_ms = ITL_TARGET_DECODE_STEPS * self.predictor.estimate(rows, rows, row_context).predicted_ms
            target_ms *= min(max(1, self.backlog.prompts / rows), MAX_TARGET_FACTOR)
        smallest_ms = self.predicted_ms(self.smallest_holding(self.min_chunk))
        return self.predicted_ms(size) <= max(target_ms, SMALLEST_STEP_FACTOR * smallest_ms)

    def predicted_ms(self, size: int) -> float:
        rows, row_context, _, _, prefix = self.backlog
        return self.predictor.estimate(size, rows, row_context, (size - rows) * prefix, prefix).predicted_ms

    def delay(self, size: int) -> float:
        """The sum of the docstring of step_size.py, added step by step; no step has more than `size` tokens."""
        costs, (rows, row_context, prompts, left, prefix) = self.predictor.costs, self.backlog
        total = 0.0
        while left:
            tokens = min(left, size - rows)
            padded = min(other for other in self.sizes() if other >= rows + tokens)
            step_ms = costs.mixed_ms(padded, row_context, (padded - rows) * prefix, prefix)
            total += FIRST_TOKEN_WEIGHT * prompts * step_ms + rows * (step_ms - costs.decode_ms(rows, row_context))
            left -= tokens
        return total


@st.composite
def choices(draw: st.DrawFn) -> Choice:
    distance, largest = draw(st.integers(1, 64)), draw(st.integers(40, 300))
    sizes = sorted({largest, *range(distance, largest, distance), *draw(st.sets(st.integers(1, largest), max_size=4))})
    base, slope, jumps = draw(st.integers(1, 100)), draw(st.integers(0, 40)), draw(st.integers(0, 20))
    times = [base + (slope * size) / 64 + draw(st.integers(0, jumps)) for size in sizes]
    decode_rows = sorted({*draw(st.sets(st.integers(1, 32), min_size=1, max_size=3))})
    costs = StepCosts(
        tuple(zip(sizes, times, strict=True)),
        tuple((rows, float(draw(st.integers(1, 100)))) for rows in decode_rows),
        draw(st.integers(0, 100)),
        draw(st.sampled_from([0.0, 1 / 1024, 1 / 64, 1 / 16])),
        draw(st.sampled_from([0.0, 1 / 1024, 1 / 64])),
        draw(st.sampled_from([0.0, 1 / 64, 1 / 4])),
    )
    predictor = StepPredictor(costs, lambda rows: tuple(sizes))
    predictor.corrections = {kind: draw(st.sampled_from([0.5, 1.0, 2.0])) for kind in predictor.corrections}
    backlog = Backlog(
        rows=draw(st.integers(1, 32)),
        row_context=draw(st.integers(0, 500)),
        prompts=draw(st.integers(1, 64)),
        prompt_tokens=draw(st.integers(1, 300) | st.integers(100, 2000)),
        prefix=draw(st.integers(0, 9) | st.integers(0, 1000)),
    )
    target_ms = draw(st.none() | st.integers(1, 300).map(float) | st.just(NO_TARGET))
    return Choice(predictor, backlog, target_ms, draw(st.integers(1, 8) | st.integers(1, 300)))


@settings(suppress_health_check=[HealthCheck.too_slow])  # another process may use the cores
@given(choice=choices())
def test_a_step_holds_a_prompt_token_meets_the_target_or_is_the_smallest_and_is_not_larger_than_needed(
    choice: Choice,
) -> None:
    size, backlog = choice.size(), choice.backlog
    assert size in choice.sizes()
    assert size > backlog.rows
    assert size <= choice.smallest_holding(backlog.prompt_tokens)
    needed = min(choice.min_chunk, backlog.prompt_tokens)
    assert size >= choice.smallest_holding(needed)
    assert size == choice.smallest_holding(needed) or choice.meets_target(size)


@settings(max_examples=500)
@given(choice=choices())
def test_the_size_is_the_one_that_trying_all_sizes_finds(choice: Choice) -> None:
    largest = choice.smallest_holding(choice.backlog.prompt_tokens)
    smallest = min(largest, choice.smallest_holding(choice.min_chunk))
    allowed = [size for size in choice.sizes() if smallest <= size <= largest]
    meeting = [size for size in allowed if choice.meets_target(size)] or [smallest]
    least = min(map(choice.delay, meeting))
    assert choice.size() == max(size for size in meeting if choice.delay(size) == least)


def check_order(choice: Choice, change: Callable[[int], Choice], values: tuple[int, int]) -> None:
    """`change` with the larger of two values does not lead to a smaller step."""
    smaller, larger = (change(value).size() for value in sorted(values))
    assert smaller <= larger, (choice, values)


COUNTS = st.tuples(st.integers(1, 64), st.integers(1, 64))


@settings(max_examples=400)
@given(choice=choices(), counts=COUNTS)
def test_more_prompts_with_as_many_tokens_never_lead_to_a_smaller_step(choice: Choice, counts: tuple[int, int]) -> None:
    """More prompts give the total time of the steps more weight, so it does not increase. A size with a shorter total
    was rejected with fewer prompts because its steps exceed decode steps by more in total: they are fewer, and larger.
    """
    check_order(choice, lambda prompts: choice.changed(prompts=prompts), counts)


@given(choice=choices(), targets=st.tuples(st.integers(1, 300), st.integers(1, 300)))
def test_a_longer_target_never_leads_to_a_smaller_step(choice: Choice, targets: tuple[int, int]) -> None:
    check_order(choice, lambda target: choice._replace(target_ms=float(target)), targets)
