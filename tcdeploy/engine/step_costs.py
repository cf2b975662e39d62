"""Predicts the milliseconds of a step from steps that were timed during warm-up. Does not import torch.

A step costs what its padded size costs: a bucket of 512 tokens takes equally long with 1 token and with 512. The table
therefore holds the sizes that steps are padded to. If there are more sizes than measurements, the time of a size is
interpolated between the measured sizes around it.

A mixed step of T tokens, R of which belong to decode rows, takes

    prefill_ms(T) + decode_ms(R) - decode_ms(1)

The first term has the products of all T tokens. The other two are the time that the decode attention of R rows takes:
a decode step of few rows is bound by reading the weights, which the products of the mixed step read anyway.

Clocks, other processes and long contexts change these times. `StepPredictor` multiplies the table by a factor for each
kind of step, which follows the measured times of the steps that are served.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from tcdeploy.cache.manifest import BucketRecord
from tcdeploy.planning.plan import Plan

DYNAMIC_STEP_TOKENS = 16  # without graphs a dynamic program has no sizes; predictions round up to a multiple of this
CORRECTION_WEIGHT = 0.05  # of the latest step, in the moving average: it spans about 20 steps
MIN_CORRECTION, MAX_CORRECTION = 0.5, 2.0

StepKind = Literal["decode", "mixed", "prefill"]
STEP_KINDS: tuple[StepKind, ...] = ("decode", "mixed", "prefill")


@dataclass(frozen=True)
class StepCosts:
    """Measured milliseconds of steps, and the sizes that steps are padded to.

    prefill_ms: (tokens, ms) of prefill steps without decode rows, ascending by tokens.
    decode_ms_by_rows: (rows, ms) of decode steps, ascending by rows. A decode step is padded to one of these.
    step_sizes: sizes in tokens that prefill and mixed steps are padded to, ascending.
    min_chunk_tokens: the least prompt tokens of a mixed step, whatever the target, so that prompts always progress. A
        step of so few tokens is bound by reading the weights: a smaller chunk would take as long, and a prompt would
        need more steps.
    """

    prefill_ms: tuple[tuple[int, float], ...]
    decode_ms_by_rows: tuple[tuple[int, float], ...]
    step_sizes: tuple[int, ...]
    min_chunk_tokens: int = 32

    def __post_init__(self) -> None:
        for sizes in (
            [tokens for tokens, _ in self.prefill_ms], [rows for rows, _ in self.decode_ms_by_rows], self.step_sizes,
        ):  # fmt: skip
            assert sizes and list(sizes) == sorted(set(sizes)) and sizes[0] >= 1, f"{sizes} are not ascending sizes"
        times = [ms for _, ms in (*self.prefill_ms, *self.decode_ms_by_rows)]
        assert all(0 < ms < math.inf for ms in times), f"{times} are not times"

    def decode_ms(self, rows: int) -> float:
        """A decode step of `rows` rows."""
        index = bisect_left(self._decode_rows, rows)
        return self.decode_ms_by_rows[min(index, len(self._decode_rows) - 1)][1]

    def predict_ms(self, tokens: int, rows: int) -> float:
        """A step of `tokens` tokens, those of `rows` decode rows included; a decode step if it has no others."""
        if tokens == rows:
            return self.decode_ms(rows)
        index = bisect_left(self.step_sizes, tokens)
        return self._size_ms[min(index, len(self.step_sizes) - 1)] + self._rows_ms(rows)

    def max_tokens(self, rows: int, target_ms: float) -> int:
        """The largest size of a mixed step with `rows` decode rows that is predicted to take at most `target_ms`.

        At least `min_tokens(rows)`, even if that takes longer.
        """
        largest = bisect_right(self._size_ms, target_ms - self._rows_ms(rows)) - 1
        return max(self.step_sizes[largest] if largest >= 0 else 0, self.min_tokens(rows))

    def size_below(self, tokens: int) -> int:
        """The step size before the one that holds `tokens` tokens; 0 if the smallest size holds them."""
        index = bisect_left(self.step_sizes, tokens)
        return self.step_sizes[index - 1] if index else 0

    def min_tokens(self, rows: int) -> int:
        """The smallest size that holds `rows` tokens and a minimum chunk, or the largest size there is."""
        index = bisect_left(self.step_sizes, rows + self.min_chunk_tokens)
        return self.step_sizes[min(index, len(self.step_sizes) - 1)]

    def _rows_ms(self, rows: int) -> float:
        """The decode attention of `rows` rows, beside the products that they share with a prompt."""
        return max(0.0, self.decode_ms(rows) - self.decode_ms(1)) if rows else 0.0

    @cached_property
    def _decode_rows(self) -> tuple[int, ...]:
        return tuple(rows for rows, _ in self.decode_ms_by_rows)

    @cached_property
    def _size_ms(self) -> tuple[float, ...]:
        """The time of each step size, without decode rows; ascending.

        Below the smallest measured size it approaches a decode step of one row, which also computes one token. A size
        that took longer than a larger one was interrupted while it was timed, so it gets the time of the larger one.
        """
        smallest, ms = self.prefill_ms[0]
        points = [(1, min(ms, self.decode_ms(1)))] * (smallest > 1) + list(self.prefill_ms)
        descending = [_interpolate(points, size) for size in reversed(self.step_sizes)]
        return tuple(itertools.accumulate(descending, min))[::-1]


def make_step_costs(plan: Plan, records: Iterable[BucketRecord]) -> StepCosts | None:
    """The costs that warm-up measured. None if a bucket was not timed."""
    measured = {record.bucket: record.step_ms for record in records}
    times = [(bucket, measured.get(bucket.name)) for bucket in plan.buckets]
    timed = [(bucket, ms) for bucket, ms in times if ms is not None]
    if len(timed) < len(times):
        return None
    sizes: set[int] = set()
    for bucket in plan.prefill_buckets:
        sizes |= {
            bucket.size,
            *(plan.step_sizes(bucket) or range(DYNAMIC_STEP_TOKENS, bucket.size, DYNAMIC_STEP_TOKENS)),
        }
    return StepCosts(
        tuple((bucket.size, ms) for bucket, ms in timed if bucket.is_prefill),
        tuple((bucket.size, ms) for bucket, ms in timed if not bucket.is_prefill),
        tuple(sorted(sizes)),
    )


class StepEstimate(NamedTuple):
    """The predicted time of a step. `table_ms` is without the correction."""

    kind: StepKind
    table_ms: float
    predicted_ms: float


class StepPredictor:
    """Step costs, corrected by the measured times of the steps that are served.

    The correction of a kind of step is the exponential moving average of measured / table, each ratio limited to
    MIN_CORRECTION..MAX_CORRECTION, so that one interrupted step does not change it much.
    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.corrections: dict[str, float] = dict.fromkeys(STEP_KINDS, 1.0)

    def estimate(self, tokens: int, rows: int) -> StepEstimate:
        """The prediction for a step of `tokens` tokens, those of `rows` decode rows included."""
        kind: StepKind = "decode" if tokens == rows else "mixed" if rows else "prefill"
        table_ms = self.costs.predict_ms(tokens, rows)
        return StepEstimate(kind, table_ms, table_ms * self.corrections[kind])

    def max_tokens(self, rows: int, target_ms: float) -> int:
        """As `StepCosts.max_tokens`, with the correction of mixed steps."""
        return self.costs.max_tokens(rows, target_ms / self.corrections["mixed"])

    def observe(self, estimate: StepEstimate, measured_ms: float) -> None:
        """Update the correction with the measured time of a step."""
        ratio = min(max(measured_ms / estimate.table_ms, MIN_CORRECTION), MAX_CORRECTION)
        self.corrections[estimate.kind] += CORRECTION_WEIGHT * (ratio - self.corrections[estimate.kind])


def _interpolate(points: list[tuple[int, float]], size: int) -> float:
    """Linear between the points around `size`; the nearest point's value outside of them."""
    index = bisect_left(points, (size, -math.inf))
    if index == 0 or index == len(points):
        return points[min(index, len(points) - 1)][1]
    (low, low_ms), (high, high_ms) = points[index - 1], points[index]
    return low_ms + (high_ms - low_ms) * (size - low) / (high - low)
