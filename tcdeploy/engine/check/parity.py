"""Decides whether a bucket's logits differ from the reference (engine/check/reference.py) by rounding errors only.

Two bfloat16 computations of a model always differ, and more so in deep models, so no fixed tolerance fits all models.
The yardstick is transformers' eager computation in the same dtype. Eager and compiled logits are both compared with a
higher-precision computation of the same weights. A bucket's distance may be at most MAX_RATIO times the eager distance,
both in the largest logit difference and in the KL divergence (there MAX_RATIO squared, since KL grows with the square
of the differences).

The eager distance is the maximum over the compared rows and a sample of other rows. The sample is larger for models
with routed experts: a rounding error can select another expert and change a few rows much more than usual. A limit that
allows for this can hide two kinds of faults. A fault in all rows is caught by the separate limit on the median KL
divergence. A fault in one row, such as a wrong KV block, is caught by `outlier_rows`, which compares each row with a
high quantile of the eager rows. A rounding error can also make a row an outlier, but not the same row on several sets
of prompts (parity_check.py).

Differences of a few units in the last place always pass (ROUNDING). With an FP8 KV cache, such a difference of K or V
may lead to the next FP8 value, 1/16 farther. In 16 bits this happens in every row, also of the eager computation; in
float32 it happens to single values of few prompts, so there one of them may pass too (FP8_KV_ROUNDING). Without a
higher-precision reference, the bucket is compared with eager logits within fixed tolerances.

Some models exclude tokens by setting their logits to -inf or to the lowest value of the dtype. All logits up to
EXCLUDED_LOGIT count as equal.

If transformers' eager computation is itself wrong for a config, a program that is as wrong would pass. In float32 such
a distance is far larger than any rounding error, so there the largest logit difference also has a fixed limit
(MAX_FLOAT32_DIFFERENCE).
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from tcdeploy.planning.bucket_record import GreedyTokens, Parity

MAX_RATIO = 1.5  # on an H100 six shapes of 8B to 32B had ratios up to 1.0, small models on a CPU up to 1.2
# By compute dtype: (difference as a share of the largest reference logit, KL divergence in nats).
ROUNDING = {"float32": (1e-5, 1e-9), "float16": (1e-3, 1e-6), "bfloat16": (8e-3, 1e-5)}
FP8_KV_ROUNDING = (3e-2, 2e-3)  # float32; 240 checks of small models gave at most 1.5e-2 and 9e-4
FP8_KV_MEDIAN_KL = 1e-4  # float32; the same checks gave at most 1.4e-5
MAX_FLOAT32_DIFFERENCE = 5e-2  # of the largest logit; log-probabilities of 182 model types differed by at most 5e-5
EXCLUDED_LOGIT = -65504.0  # the lowest value of float16; an excluded token has this logit or a lower one
TOLERANCE = {"float32": (1e-3, 1e-5), "float16": (5e-2, 1e-2), "bfloat16": (1e-1, 2e-2)}
EAGER_QUANTILE = 0.75  # of the eager rows' KL divergence; compared with the median of the bucket's rows
# The median of fewer rows has the limit of the largest. A single eager row of small bfloat16 models exceeds that of the
# median in 2 to 8 of 100 cases, so two sets of prompts would refuse 0.04 to 0.6% of the right starts.
MIN_MEDIAN_ROWS = 4
OUTLIER_QUANTILE = 0.95  # of the eager rows; a row more than MAX_RATIO times farther is an outlier


def compare_logits(
    logits: Tensor, eager: Tensor, precise: Tensor, compute_dtype: str, reference_dtype: str, sampled_distances: Tensor,
    has_fp8_kv: bool = False,
) -> Parity:  # fmt: skip
    """Compare a bucket's `logits` with those of the reference; each [rows, vocab]. A NaN on any side fails the check.

    `reference_dtype` and `sampled_distances`: as in `ReferenceLogits`.
    """
    distances = row_distances(logits, precise)
    eager_distances = torch.cat([row_distances(eager, precise), sampled_distances.to(logits.device)])
    max_difference, kl = distances.amax(dim=0).tolist()
    median_kl = distances[:, 1].median().item()
    eager_max_difference, eager_kl = eager_distances.amax(dim=0).tolist()
    largest = max(largest_logit(precise), 1e-30)
    if reference_dtype == compute_dtype:  # `precise` is `eager`
        tolerance, kl_limit = TOLERANCE[compute_dtype]
        limit, median_kl_limit = tolerance * largest, kl_limit
    else:
        rounding, kl_rounding, median_kl_rounding = _rounding(compute_dtype, has_fp8_kv)
        limit = max(MAX_RATIO * eager_max_difference, rounding * largest)
        if compute_dtype == "float32":
            limit = min(limit, MAX_FLOAT32_DIFFERENCE * largest)
        kl_limit = max(MAX_RATIO**2 * eager_kl, kl_rounding)
        typical_eager_kl = eager_distances[:, 1].quantile(EAGER_QUANTILE).item()
        is_median = logits.shape[0] >= MIN_MEDIAN_ROWS
        median_kl_limit = max(MAX_RATIO**2 * typical_eager_kl, median_kl_rounding) if is_median else kl_limit
    return Parity(
        rows=logits.shape[0],
        reference_dtype=reference_dtype,
        max_difference=max_difference,
        relative_difference=max_difference / largest,
        kl=kl,
        median_kl=median_kl,
        eager_max_difference=eager_max_difference,
        eager_kl=eager_kl,
        max_difference_limit=limit,
        kl_limit=kl_limit,
        median_kl_limit=median_kl_limit,
        outlier_rows=0,  # this and the next two are set by parity_check.py
        attempts=1,
        reference_changed=False,
        passed=max_difference <= limit and kl <= kl_limit and median_kl <= median_kl_limit,
    )


def outlier_rows(
    logits: Tensor, eager: Tensor, precise: Tensor, compute_dtype: str, reference_dtype: str, sampled_distances: Tensor,
    has_fp8_kv: bool = False,
) -> frozenset[int]:  # fmt: skip
    """Rows much farther from the precise logits than most eager rows and than the same eager row.

    Empty if `precise` could not be computed in a higher precision.
    """
    if reference_dtype == compute_dtype:
        return frozenset()
    distances, eager_distances = row_distances(logits, precise), row_distances(eager, precise)
    typical = torch.cat([eager_distances, sampled_distances.to(logits.device)]).quantile(OUTLIER_QUANTILE, dim=0)
    ratios = torch.tensor([MAX_RATIO, MAX_RATIO**2], dtype=distances.dtype, device=distances.device)
    rounding, kl_rounding, _ = _rounding(compute_dtype, has_fp8_kv)
    minimum = torch.tensor([rounding * largest_logit(precise), kl_rounding], device=distances.device)
    limits = torch.maximum(ratios * torch.maximum(typical, eager_distances), minimum)
    is_outlier = ~(distances <= limits).all(dim=1)  # NaN too
    return frozenset(is_outlier.nonzero().flatten().tolist())


def _rounding(compute_dtype: str, has_fp8_kv: bool) -> tuple[float, float, float]:
    """As ROUNDING, and the median KL divergence."""
    if has_fp8_kv and compute_dtype == "float32":
        return *FP8_KV_ROUNDING, FP8_KV_MEDIAN_KL
    difference, kl = ROUNDING[compute_dtype]
    return difference, kl, kl


def row_distances(logits: Tensor, precise: Tensor) -> Tensor:
    """[rows, 2] float64: each row's largest difference of logits, and its KL divergence in nats."""
    logits, precise = comparable(logits.double()), comparable(precise.double())
    log_p, log_q = precise.log_softmax(dim=-1), logits.log_softmax(dim=-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1).clamp(min=0)  # rounding may leave it below 0
    return torch.stack([(logits - precise).abs().amax(dim=-1), kl], dim=1)


def comparable(logits: Tensor) -> Tensor:
    """The logits, with those of excluded tokens equal."""
    return logits.clamp(min=EXCLUDED_LOGIT)


def largest_logit(logits: Tensor) -> float:
    """The largest absolute value of the logits that do not exclude a token."""
    return logits.abs().where(logits > EXCLUDED_LOGIT, 0).max().item()


def greedy_tokens(inputs: list[list[int]], logits: Tensor) -> GreedyTokens:
    """The most likely token of each row of `logits` [rows, vocab], which followed that row's token ids."""
    likeliest = logits.float().log_softmax(dim=-1).max(dim=-1)
    digest = hashlib.sha256(repr(inputs).encode()).hexdigest()
    return GreedyTokens(digest, tuple(likeliest.indices.tolist()), tuple(likeliest.values.tolist()))
