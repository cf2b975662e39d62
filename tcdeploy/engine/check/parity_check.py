"""Checks one bucket: runs its step on the check prompts and compares the logits with the reference.

The bucket runs as it will serve, from its CUDA graph if it has one. A prefill bucket is also checked on the second
chunk of a prompt, which attends to the first chunk through the paged cache, and on decode rows in the same step if
steps are mixed. parity.py has the comparison and its limits, reference.py the reference.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tcdeploy.engine.check.check_prompts import CheckPrompts, checked_rows
from tcdeploy.engine.check.inputs import WarmupBatch, make_check_batch
from tcdeploy.engine.check.parity import compare_logits, greedy_tokens, outlier_rows
from tcdeploy.engine.check.reference import (
    ReferenceLogits,
    compute_references,
    reference_attn_implementation,
    reference_changed,
)
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.errors import CompileError
from tcdeploy.host.progress import Progress
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.backends import FP8_KV
from tcdeploy.planning.bucket_record import GreedyTokens, Parity
from tcdeploy.planning.plan import Bucket

MAX_ATTEMPTS = 4  # sets of prompts
MAX_FAILURES = 2  # attempts whose distances exceed the limits
MAX_EXCESS = 4  # times the limit
FIRST_SEED = 0  # of the prompts of the first attempt, whose reference is stored
log = logging.getLogger("tcdeploy.engine")
FAILED = "failed its parity check"


class ParityCheck(NamedTuple):
    """The comparison, its outliers, and the most likely tokens of the eager reference and of the bucket."""

    parity: Parity
    outlier_rows: frozenset[int]
    eager_greedy_tokens: GreedyTokens
    greedy_tokens: GreedyTokens


class StoredReferenceDiffers(Exception):  # noqa: N818 - not an error: `prepare` handles it by computing the reference
    """A bucket's logits differ from a stored reference."""


class ParityChecker:
    """Checks the buckets of a model.

    A check that fails is repeated on other prompts: by chance, rounding errors may be larger than the limit on a few
    rows. A bucket fails if it exceeds the limits on MAX_FAILURES sets of prompts, or if one row is an outlier on all
    MAX_ATTEMPTS sets. A check is not repeated after a NaN or a difference of MAX_EXCESS times the limit, which is no
    rounding error, nor if the reference has changed, since a changed weight would also be in a new reference.

    With a stored reference (stored_reference.py) no check is repeated: `check` raises StoredReferenceDiffers, and
    `prepare` loads the model again. The modules of the present model may already have been changed, and then a
    reference computed from them would have the same fault.
    """

    def __init__(
        self, runner: ModelRunner, architecture: Architecture, config: Any, stored: ReferenceLogits | None = None,
        progress: Progress | None = None,
    ) -> None:  # fmt: skip
        """Compute the reference of the first check, unless it is `stored`. `progress`: of this computation."""
        self._runner, self._architecture, self._config = runner, architecture, config
        self._attempts: list[tuple[CheckPrompts, ReferenceLogits]] = []
        self._is_stored = stored is not None
        if stored is not None:
            self._attempts.append((CheckPrompts(runner.plan, architecture, config, seed=FIRST_SEED), stored))
        self._prompts_and_reference(0, progress)

    @property
    def reference(self) -> ReferenceLogits:
        """The reference of the first set of prompts."""
        return self._prompts_and_reference(0)[1]

    def make_batch(self, bucket: Bucket) -> WarmupBatch:
        """The batch on which the bucket is compiled and checked first."""
        prompts, _ = self._prompts_and_reference(0)
        return make_check_batch(self._runner, bucket, prompts, prompts.batch(bucket))

    def check(self, bucket: Bucket) -> ParityCheck:
        """Compare the bucket's logits with the reference. Raises StoredReferenceDiffers.

        Does not raise if they differ from a reference that this start computed: see `raise_if_failed`.
        """
        failures, outliers = 0, frozenset[int](range(bucket.size + 1))
        for number in range(MAX_ATTEMPTS):
            check = _check(self._runner, bucket, *self._prompts_and_reference(number))
            check = check._replace(parity=dataclasses.replace(check.parity, attempts=number + 1))
            failures += not check.parity.passed
            outliers &= check.outlier_rows
            if check.parity.passed and not outliers:
                break
            self._runner.filled_state = None  # the bucket may have overwritten blocks
            if self._is_stored:
                outlier_text = f"; {len(outliers)} outlier rows" if check.parity.passed else ""
                raise StoredReferenceDiffers(
                    f"{bucket.name} differs from the stored one: {describe_parity(check.parity)}{outlier_text}"
                )
            changed = self._reference_changed()
            is_rounding = check.parity.max_difference <= MAX_EXCESS * check.parity.max_difference_limit  # False for NaN
            if changed or failures == MAX_FAILURES or not is_rounding or number == MAX_ATTEMPTS - 1:
                parity = dataclasses.replace(
                    check.parity, passed=False, outlier_rows=len(outliers), reference_changed=changed
                )
                return check._replace(parity=parity)
            if not check.parity.passed:
                log.warning("%s is checked again: %s", bucket.name, describe_parity(check.parity))
        return check

    def _reference_changed(self) -> bool:
        implementation = reference_attn_implementation(self._architecture, self._runner.plan)
        return reference_changed(self._runner, *self._prompts_and_reference(0), implementation)

    def _prompts_and_reference(
        self, number: int, progress: Progress | None = None
    ) -> tuple[CheckPrompts, ReferenceLogits]:
        if number == len(self._attempts):
            prompts = CheckPrompts(self._runner.plan, self._architecture, self._config, seed=FIRST_SEED + number)
            implementation = reference_attn_implementation(self._architecture, self._runner.plan)
            self._attempts.append((prompts, compute_references(self._runner, prompts, implementation, progress)))
        return self._attempts[number]


def _check(runner: ModelRunner, bucket: Bucket, prompts: CheckPrompts, references: ReferenceLogits) -> ParityCheck:
    logits = run_check_steps(runner, bucket, prompts)
    prefixes = [*prompts.checked(bucket), *prompts.continued(bucket), *prompts.mixed_rows(bucket)]
    rows = [references.rows[prefix] for prefix in prefixes]
    eager, precise = (torch.stack(column).to(logits.device) for column in zip(*rows, strict=True))
    inputs = [prompts.token_ids(prefix) for prefix in prefixes]
    dtypes, has_fp8_kv = (runner.plan.compute_dtype, references.dtype), runner.plan.kv_dtype == FP8_KV
    compared = (logits, eager, precise, *dtypes, references.sampled_distances, has_fp8_kv)
    return ParityCheck(
        compare_logits(*compared), outlier_rows(*compared), greedy_tokens(inputs, eager), greedy_tokens(inputs, logits)
    )


def run_check_steps(runner: ModelRunner, bucket: Bucket, prompts: CheckPrompts) -> Tensor:
    """Returns the logits [rows, vocab] of the checked rows, the continued prompt, and the decode rows beside it."""
    batch = make_check_batch(runner, bucket, prompts, prompts.batch(bucket))
    if not bucket.is_prefill:
        batch.fill_state()
    logits = batch.run().logits[checked_rows(bucket, len(batch.sequences))].clone()
    prefixes = [*prompts.continued(bucket), *prompts.mixed_rows(bucket)]
    if not prefixes:
        return logits
    continued = make_check_batch(runner, bucket, prompts, prefixes)
    output, first_row = continued.run_in_two_chunks().logits, runner.plan.max_prefill_sequences
    return torch.cat([logits, output[:1], output[first_row : first_row + len(prefixes) - 1]])


def raise_if_failed(parity: Parity, bucket: Bucket) -> None:
    if not parity.passed:
        raise CompileError(
            f"{bucket.name} {FAILED}: {describe_parity(parity)}",
            "find the part with --programs jit --region blocks --mode default, then --attention reference",
        )


def describe_parity(parity: Parity) -> str:
    """The distances of compiled and eager logits, and the limits, for messages."""
    dtype = parity.reference_dtype
    text = f"compiled logits differ from {dtype} by {parity.max_difference:.3g} and KL {parity.kl:.2g} nats"
    if parity.eager_kl:
        text += f", transformers' eager logits by {parity.eager_max_difference:.3g} and {parity.eager_kl:.2g}"
    text += f" (limits {parity.max_difference_limit:.3g} and {parity.kl_limit:.2g})"
    if parity.median_kl > parity.median_kl_limit:
        text += f"; the median KL of {parity.rows} rows is {parity.median_kl:.2g} (limit {parity.median_kl_limit:.2g})"
    if parity.reference_changed:
        return f"{text}; the weights or the modules of the model have changed since the reference was computed"
    if parity.outlier_rows and parity.attempts == MAX_ATTEMPTS:
        text += f"; rows that are outliers on {MAX_ATTEMPTS} sets of prompts: {parity.outlier_rows}"
    return text
