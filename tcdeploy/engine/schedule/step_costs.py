"""Predicts the milliseconds of a step from steps that were timed before, and measures it. Does not import torch.

A step is padded to a size in tokens. Its GEMMs take as long as that size requires, however many of its tokens are
padding. Its attention also depends on the tokens in the KV cache. The predicted time of a step is

    prefill or mixed    size_ms(size) + decode_context_ms * row_context + attention to prefixes
    decode              decode_ms(rows) + decode_context_ms * (row_context - row_context of the timed step)

where

    attention to prefixes = prefix_pair_ms * prefix_pairs + prefix_token_ms * prefix

    row_context     tokens in the KV cache, summed over the decode rows
    prefix          tokens before a chunk in its prompt, whose keys are in the KV cache; the maximum over the chunks
    prefix_pairs    pairs of a token of a chunk and a token of its prefix, summed over the chunks

size_ms includes the attention of a chunk to itself. The second term of the attention to prefixes does not depend on the
size of the chunk: each Triton program computes a tile of 64 queries even if few are used, and a few programs use only
part of the GPU. `StepPredictor` multiplies the result by a factor for each kind of step, which follows the measured
times of the steps that are served, because GPU clocks, other processes and sliding-window attention change them.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

CORRECTION_WEIGHT = 0.05  # of the latest step, in the moving average: it spans about 20 steps
MIN_CORRECTION, MAX_CORRECTION = 0.5, 2.0
SLOW_SIZE_FACTOR = 1.02  # differences below 2% may be noise
MIN_DECODE_SHARE = 0.5  # least predicted time of a decode step with short contexts, as a share of its measured time

StepKind = Literal["decode", "mixed", "prefill"]
STEP_KINDS: tuple[StepKind, ...] = ("decode", "mixed", "prefill")
StepSizes: TypeAlias = "Callable[[int], tuple[int, ...]]"


@dataclass(frozen=True)
class StepCosts:
    """Measured times of steps."""

    prefill_ms: tuple[tuple[int, float], ...]  # (tokens, ms) of steps of one prompt without a prefix, ascending
    decode_ms_by_rows: tuple[tuple[int, float], ...]  # (rows, ms), ascending; a decode step is padded to one of these
    timed_context: int = 0  # tokens in the KV cache of each row while decode steps were timed
    decode_context_ms: float = 0.0  # of decode attention per token in the KV cache
    prefix_pair_ms: float = 0.0  # of prefill attention per pair of a chunk token and a prefix token
    prefix_token_ms: float = 0.0  # additional ms of prefill attention per prefix token, whatever the chunk's size
    idle_sizes: tuple[int, ...] = ()  # of prefill_ms: those that a server timed while idle, in this or an earlier start

    def __post_init__(self) -> None:
        """Raises ValueError: the values may come from a file."""
        for sizes in ([tokens for tokens, _ in self.prefill_ms], [rows for rows, _ in self.decode_ms_by_rows]):
            if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
                raise ValueError(f"{sizes} are not ascending sizes")
        times = [ms for _, ms in (*self.prefill_ms, *self.decode_ms_by_rows)]
        if not all(0 < ms < math.inf for ms in times):
            raise ValueError(f"times must be positive and finite: {times}")
        if not {*self.idle_sizes} <= dict(self.prefill_ms).keys():
            raise ValueError(f"{self.idle_sizes} are not all timed")
        factors = (self.decode_context_ms, self.prefix_pair_ms, self.prefix_token_ms)
        if not all(0 <= factor < math.inf for factor in factors):
            raise ValueError(f"factors must be finite and not negative: {factors}")

    def decode_ms(self, rows: int, row_context: int | None = None) -> float:
        """Milliseconds of a decode step of `rows` rows. `row_context` None: that of the timed step."""
        index = bisect_left(self._decode_rows, rows)
        padded_rows, ms = self._decode_points[min(index, len(self._decode_rows) - 1)]
        if row_context is None:
            return ms
        difference = row_context - padded_rows * self.timed_context
        return max(ms + self.decode_context_ms * difference, MIN_DECODE_SHARE * ms)

    def size_ms(self, size: int) -> float:
        """Milliseconds of a prefill step of `size` tokens that has one prompt without a prefix.

        Interpolated linearly between measured sizes; one token takes as long as a decode step of one row.
        """
        return _interpolate(self._size_points, size)

    def mixed_ms(self, size: int, row_context: int, prefix_pairs: int, prefix: int) -> float:
        """Milliseconds of a prefill or mixed step that is padded to `size` tokens."""
        prefix_ms = self.prefix_pair_ms * prefix_pairs + self.prefix_token_ms * prefix
        return self.size_ms(size) + self.decode_context_ms * row_context + prefix_ms

    def with_prefill_ms(self, size: int, ms: float) -> StepCosts:
        """These costs, with the time of a prefill step of `size` tokens, timed while idle, added or replaced."""
        times = tuple(sorted({**dict(self.prefill_ms), size: ms}.items()))
        return replace(self, prefill_ms=times, idle_sizes=tuple(sorted({*self.idle_sizes, size})))

    @cached_property
    def slow_sizes(self) -> frozenset[int]:
        """The timed prefill sizes that take longer than a larger one, as with some GEMMs of cuBLAS."""
        times = list(self.prefill_ms)
        least_above = list(itertools.accumulate((ms for _, ms in reversed(times)), min))[::-1][1:]
        return frozenset(
            size for (size, ms), least in zip(times, least_above, strict=False) if ms > SLOW_SIZE_FACTOR * least
        )

    @cached_property
    def _decode_rows(self) -> tuple[int, ...]:
        return tuple(rows for rows, _ in self.decode_ms_by_rows)

    @cached_property
    def _decode_points(self) -> list[tuple[int, float]]:
        return _never_decreasing(list(self.decode_ms_by_rows))

    @cached_property
    def _size_points(self) -> list[tuple[int, float]]:
        """The points (tokens, ms) that `size_ms` interpolates, ascending in tokens."""
        smallest, ms = self.prefill_ms[0]
        return _never_decreasing([(1, min(ms, self.decode_ms(1)))] * (smallest > 1) + list(self.prefill_ms))


def parse_step_costs(values: Mapping[str, Any]) -> StepCosts:
    """StepCosts from its fields as JSON holds them, in lists. Raises ValueError, KeyError or TypeError for others."""
    times = {name: tuple(map(tuple, values[name])) for name in ("prefill_ms", "decode_ms_by_rows")}
    return StepCosts(**{**values, **times, "idle_sizes": tuple(values["idle_sizes"])})


class StepEstimate(NamedTuple):
    """The predicted time of a step. `table_ms` is without the correction."""

    kind: StepKind
    table_ms: float
    predicted_ms: float


class StepPredictor:
    """Step costs, corrected by the measured times of the steps that are served.

    step_sizes: returns the sizes, in tokens and ascending, that steps with prompts and the given number of decode rows
        are padded to. They may change between two steps: a size is added when its CUDA graph is captured.

    The correction of a kind of step is the exponential moving average of measured / table, each ratio limited.
    """

    def __init__(self, costs: StepCosts, step_sizes: StepSizes) -> None:
        self.costs, self.step_sizes = costs, step_sizes
        self.corrections: dict[str, float] = dict.fromkeys(STEP_KINDS, 1.0)

    def estimate(
        self, tokens: int, rows: int, row_context: int = 0, prefix_pairs: int = 0, prefix: int = 0
    ) -> StepEstimate:
        """Predict a step of `tokens` tokens before padding, those of `rows` decode rows included."""
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
        ratio = min(max(measured_ms / estimate.table_ms, MIN_CORRECTION), MAX_CORRECTION)
        self.corrections[estimate.kind] += CORRECTION_WEIGHT * (ratio - self.corrections[estimate.kind])


class StepTotals(NamedTuple):
    """Sums over the measured steps of one kind."""

    steps: int = 0
    predicted_seconds: float = 0.0  # as predicted when each step was launched
    measured_seconds: float = 0.0


class StepClock:
    """Measures the time of steps without an additional synchronisation, and compares it with the predicted time.

    On a GPU, a step is measured if the host had launched all of it before the previous step completed, and was waiting
    when each of the two completed: the device then ran it from one completion to the other without a gap. The time
    includes sampling and the copy of the tokens. The first step after the engine was idle, late ones, those launched in
    two parts because masks need the previous token, and those with prompt log-probabilities are not measured.

    On a CPU a step runs while it is launched, so the time of its launch is measured, scheduling included. Another
    thread may read `totals` while it is updated.
    """

    def __init__(self, predictor: StepPredictor) -> None:
        self.predictor = predictor
        self.totals: dict[str, StepTotals] = dict.fromkeys(STEP_KINDS, StepTotals())
        self.started: float | None = None  # time at which the device started the step in flight; None: not observed

    def step_completed(
        self, estimate: StepEstimate | None, now: float, has_waited: bool, is_next_launched: bool
    ) -> None:
        """The host has seen a step of the device complete at `now` (time.perf_counter), after waiting for it or late.

        `is_next_launched`: the device runs the next step from `now` on, if the host has waited.
        """
        if estimate is not None and has_waited and self.started is not None:
            self.add(estimate, now - self.started)
        self.started = now if has_waited and is_next_launched else None

    def add(self, estimate: StepEstimate, seconds: float) -> None:
        steps, predicted, measured = self.totals[estimate.kind]
        self.totals[estimate.kind] = StepTotals(steps + 1, predicted + estimate.predicted_ms / 1e3, measured + seconds)
        self.predictor.observe(estimate, seconds * 1e3)


def _never_decreasing(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The points (size, ms) with the smallest ms from each size on: a size that took longer was interrupted."""
    times = itertools.accumulate((ms for _, ms in reversed(points)), min)
    return [(size, ms) for (size, _), ms in zip(points, list(times)[::-1], strict=True)]


def _interpolate(points: list[tuple[int, float]], size: int) -> float:
    """Linear between the points around `size`; the nearest point's value outside of them."""
    index = bisect_left(points, (size, -math.inf))
    if index == 0 or index == len(points):
        return points[min(index, len(points) - 1)][1]
    (low, low_ms), (high, high_ms) = points[index - 1], points[index]
    return low_ms + (high_ms - low_ms) * (size - low) / (high - low)
