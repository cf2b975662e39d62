"""What warming a bucket cost, and what it computed: the results that engine, cache and reports share. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

BLIND = "blind"  # outcome of a bucket that was compiled on a machine without the GPU, and has not run


@dataclass(frozen=True)
class Parity:
    """Distance of a bucket's logits from a higher-precision computation of the same weights.

    Its limits are derived from the distance of transformers' eager logits (engine/check/parity.py).
    """

    rows: int  # compared
    reference_dtype: str  # of the computation in higher precision
    max_difference: float  # between logits
    relative_difference: float  # max_difference over the largest reference logit
    kl: float  # in nats, the largest over the rows
    median_kl: float  # over the rows
    eager_max_difference: float  # of transformers' eager logits
    eager_kl: float
    max_difference_limit: float
    kl_limit: float
    median_kl_limit: float
    outlier_rows: int  # rows that were outliers on all sets of prompts
    attempts: int  # sets of prompts that were tried
    reference_changed: bool  # since it was computed, so that the bucket failed
    passed: bool


@dataclass(frozen=True)
class GreedyTokens:
    """The most likely next token of each row of a bucket's fixed inputs, and its log-probability in nats."""

    inputs_sha256: str  # of the rows' token ids
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True)
class Trial:
    """The timing of one variant on a bucket: `step_ms` is the median over its steps, None with an `error`."""

    variant: str
    step_ms: float | None
    seconds: float  # for compiling, capturing and timing it
    error: str = ""


@dataclass(frozen=True)
class BucketRecord:
    """Costs and results of warming one bucket. None: not measured."""

    bucket: str
    outcome: str  # hit, miss, uncached, reused or unknown (programs/compile_stats.py); or BLIND
    compile_seconds: float  # in the process that runs the bucket, which may load what another process has compiled
    capture_seconds: float
    check_seconds: float
    compiles: int
    programs: int
    cache_hits: int  # programs that were found in the cache
    cache_misses: int  # bypasses of the cache included
    graph_breaks: int
    cudagraph_skips: int
    captured: bool
    parity: Parity
    eager_greedy_tokens: GreedyTokens
    greedy_tokens: GreedyTokens  # of the compiled, captured bucket
    peak_memory_bytes: int
    variant: str  # name of the variant in use
    trials: tuple[Trial, ...] = ()  # all variants that were timed or failed; copied from the run that tried them
    graph_memory_bytes: int | None = None  # device memory that capturing took
    cold_seconds: float | None = None  # compile_seconds of the process that missed
    eager_ms: float | None = None
    compiled_ms: float | None = None
    eager_spread_ms: float | None = None  # half of the range of several measurements
    compiled_spread_ms: float | None = None
    kernels_timed: int = 0  # Triton configs that torch timed in this run
    # By Triton or a C++ compiler during this bucket's warm-up, trials and checks included. Kernels that threads have
    # compiled before (torch_compat/inductor/parallel_kernels.py) do not count.
    kernels_compiled: int = 0
    timed_context: int | None = None  # tokens per sequence while the step was timed

    @property
    def seconds(self) -> float:
        return self.compile_seconds + self.capture_seconds + self.check_seconds

    def with_compilation(self, other: BucketRecord) -> BucketRecord:
        """The record of a bucket that another process compiled during this start, before this process loaded it.

        It counts what both processes compiled. If the other one found all programs in the cache, nothing changes.
        """
        if other.outcome != "miss":
            return self
        return replace(
            self,
            outcome="miss",
            cache_hits=other.cache_hits,
            cache_misses=other.cache_misses + self.cache_misses,
            kernels_timed=other.kernels_timed + self.kernels_timed,
            kernels_compiled=other.kernels_compiled + self.kernels_compiled,
        )


def blind_record(bucket: str, variant: str, seconds: float, programs: int) -> BucketRecord:
    """The record of a bucket that was compiled and has not run. `seconds`: of its compilation."""
    not_checked = Parity(
        rows=0, reference_dtype="", max_difference=0.0, relative_difference=0.0, kl=0.0, median_kl=0.0,
        eager_max_difference=0.0, eager_kl=0.0, max_difference_limit=0.0, kl_limit=0.0, median_kl_limit=0.0,
        outlier_rows=0, attempts=0, reference_changed=False, passed=False,
    )  # fmt: skip
    no_tokens = GreedyTokens("", (), ())
    return BucketRecord(
        bucket=bucket, outcome=BLIND, compile_seconds=seconds, capture_seconds=0.0, check_seconds=0.0,
        compiles=programs, programs=programs, cache_hits=0, cache_misses=programs, graph_breaks=0, cudagraph_skips=0,
        captured=False, parity=not_checked, eager_greedy_tokens=no_tokens, greedy_tokens=no_tokens,
        peak_memory_bytes=0, variant=variant, cold_seconds=seconds,
    )  # fmt: skip
