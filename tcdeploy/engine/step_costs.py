"""Predicts the milliseconds of a step from steps that were timed at start-up. Does not import torch.

A step is padded to a size, and its products cost what that size costs, however many of its tokens are used. Attention
depends on the tokens in the KV cache. So a step of `size` tokens takes

    prefill or mixed    size_ms(size) + decode_context_ms * row_context + the time of attention to earlier tokens
    decode              decode_ms(rows) + decode_context_ms * (row_context - the context while it was timed)

`row_context` is the number of tokens in the KV cache of all decode rows together. The attention of a chunk to itself is
part of size_ms. Attention to tokens that earlier steps computed takes

    max(prefix_pair_ms * prefix_pairs, prefix_token_ms * prefix)

`prefix_pairs` is, summed over the chunks, the tokens of the chunk times the earlier tokens of its prompt; `prefix` is
the largest number of earlier tokens. A small chunk cannot use the whole device: however few its tokens, some program
has to walk over the prefix.

Clocks, other processes and sliding windows change these times. `StepPredictor` multiplies the result by a factor for
each kind of step, which follows the measured times of the steps that are served.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

CORRECTION_WEIGHT = 0.05  # of the latest step, in the moving average: it spans about 20 steps
MIN_CORRECTION, MAX_CORRECTION = 0.5, 2.0
MIN_DECODE_SHARE = 0.5  # of a decode step's measured time, however little context its rows have

StepKind = Literal["decode", "mixed", "prefill"]
STEP_KINDS: tuple[StepKind, ...] = ("decode", "mixed", "prefill")
StepSizes: TypeAlias = "Callable[[int], tuple[int, ...]]"


@dataclass(frozen=True)
class StepCosts:
    """Measured milliseconds of steps.

    prefill_ms: (tokens, ms) of prefill steps of one prompt without earlier tokens, ascending by tokens.
    decode_ms_by_rows: (rows, ms) of decode steps, ascending by rows. A decode step is padded to one of these.
    timed_context: tokens in the KV cache of each row while decode steps were timed.
    decode_context_ms: of a decode step, per token in the KV cache of its rows.
    prefix_pair_ms: of a prefill step, per token of a chunk and token that earlier steps computed.
    prefix_token_ms: of a prefill step of few tokens, per token that earlier steps computed.
    """

    prefill_ms: tuple[tuple[int, float], ...]
    decode_ms_by_rows: tuple[tuple[int, float], ...]
    timed_context: int = 0
    decode_context_ms: float = 0.0
    prefix_pair_ms: float = 0.0
    prefix_token_ms: float = 0.0

    def __post_init__(self) -> None:
        for sizes in ([tokens for tokens, _ in self.prefill_ms], [rows for rows, _ in self.decode_ms_by_rows]):
            assert sizes and sizes == sorted(set(sizes)) and sizes[0] >= 1, f"{sizes} are not ascending sizes"
        times = [ms for _, ms in (*self.prefill_ms, *self.decode_ms_by_rows)]
        assert all(0 < ms < math.inf for ms in times), f"{times} are not times"
        factors = (self.decode_context_ms, self.prefix_pair_ms, self.prefix_token_ms)
        assert all(0 <= factor < math.inf for factor in factors), f"{factors} are not factors"

    def decode_ms(self, rows: int, row_context: int | None = None) -> float:
        """A decode step of `rows` rows; `row_context` None: with the context of the timed step."""
        index = bisect_left(self._decode_rows, rows)
        padded_rows, ms = self.decode_ms_by_rows[min(index, len(self._decode_rows) - 1)]
        if row_context is None:
            return ms
        difference = row_context - padded_rows * self.timed_context
        return max(ms + self.decode_context_ms * difference, MIN_DECODE_SHARE * ms)

    def size_ms(self, size: int) -> float:
        """The products of a prefill or mixed step of `size` tokens, with the attention of a prompt to itself.

        Between two measured sizes it is interpolated. Below the smallest one it approaches a decode step of one row,
        which also computes one token.
        """
        return _interpolate(self._size_points, size)

    def mixed_ms(self, size: int, row_context: int, prefix_pairs: int, prefix: int) -> float:
        """A prefill or mixed step that is padded to `size` tokens."""
        prefix_ms = max(self.prefix_pair_ms * prefix_pairs, self.prefix_token_ms * prefix)
        return self.size_ms(size) + self.decode_context_ms * row_context + prefix_ms

    @cached_property
    def _decode_rows(self) -> tuple[int, ...]:
        return tuple(rows for rows, _ in self.decode_ms_by_rows)

    @cached_property
    def _size_points(self) -> list[tuple[int, float]]:
        """(tokens, ms), ascending in both. A size that took longer than a larger one was interrupted while it was
        timed, so it gets the time of the larger one."""
        smallest, ms = self.prefill_ms[0]
        points = [(1, min(ms, self.decode_ms(1)))] * (smallest > 1) + list(self.prefill_ms)
        times = itertools.accumulate((ms for _, ms in reversed(points)), min)
        return [(tokens, ms) for (tokens, _), ms in zip(points, list(times)[::-1], strict=True)]


class StepEstimate(NamedTuple):
    """The predicted time of a step. `table_ms` is without the correction."""

    kind: StepKind
    table_ms: float
    predicted_ms: float


class StepPredictor:
    """Step costs, corrected by the measured times of the steps that are served.

    step_sizes: returns the sizes in tokens, ascending, that a step with so many decode rows may be padded to. They may
        change between two steps: sizes are added when their CUDA graphs are captured.

    The correction of a kind of step is the exponential moving average of measured / table, each ratio limited to
    MIN_CORRECTION..MAX_CORRECTION, so that one interrupted step does not change it much.
    """

    def __init__(self, costs: StepCosts, step_sizes: StepSizes) -> None:
        self.costs, self.step_sizes = costs, step_sizes
        self.corrections: dict[str, float] = dict.fromkeys(STEP_KINDS, 1.0)

    def estimate(
        self, tokens: int, rows: int, row_context: int = 0, prefix_pairs: int = 0, prefix: int = 0
    ) -> StepEstimate:
        """The prediction for a step of `tokens` tokens before padding, those of `rows` decode rows included."""
        if tokens == rows:
            kind: StepKind = "decode"
            table_ms = self.costs.decode_ms(rows, row_context)
        else:
            kind = "mixed" if rows else "prefill"
            table_ms = self.costs.mixed_ms(self.padded_size(tokens, rows), row_context, prefix_pairs, prefix)
        return StepEstimate(kind, table_ms, table_ms * self.corrections[kind])

    def padded_size(self, tokens: int, rows: int) -> int:
        """The size that a step of `tokens` tokens is padded to, or the largest one."""
        sizes = self.step_sizes(rows)
        return sizes[min(bisect_left(sizes, tokens), len(sizes) - 1)]

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
