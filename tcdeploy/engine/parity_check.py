"""Check one bucket against transformers' attention: run its step, run the reference, compare the logits.

The bucket runs as it will serve, from its CUDA graph if it has one. A prefill bucket is also checked on a prompt split
into two chunks, where the second chunk attends to the first through the paged cache. `parity.py` has the comparison and
the tolerances, and `ModelRunner.reference_logits` computes the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.cache.manifest import GreedyTokens, Parity
from tcdeploy.engine.parity import compare_logits, greedy_tokens
from tcdeploy.engine.sequence import Chunk
from tcdeploy.engine.warmup_inputs import WarmupBatch
from tcdeploy.errors import CompileError
from tcdeploy.planning.plan import Bucket

MAX_CHECKED_ROWS = 4  # of a decode bucket; each costs one eager forward pass of the whole sequence


class ParityCheck(NamedTuple):
    """The comparison, and the most likely tokens of the reference and of the bucket."""

    parity: Parity
    eager_greedy_tokens: GreedyTokens
    greedy_tokens: GreedyTokens


def check_bucket(batch: WarmupBatch, attn_implementation: str) -> ParityCheck:
    """Compare the bucket's logits on `batch` with transformers' `attn_implementation` ("sdpa" or "eager").

    The keys and values of a decode batch must be in the cache. Does not raise on a difference: see `raise_if_failed`.
    """
    rows = _checked_rows(batch)
    compiled = list(batch.run().logits[rows].clone())
    inputs = [batch.sequences[row].token_ids for row in rows]
    references = [batch.runner.reference_logits(token_ids, attn_implementation) for token_ids in inputs]
    if batch.bucket.is_prefill and len(inputs[0]) > 1:
        inputs.append(inputs[0])
        compiled.append(_logits_in_two_chunks(batch))
        references.append(references[0])
    logits, reference = torch.stack(compiled), torch.stack(references)
    return ParityCheck(
        compare_logits(logits, reference, batch.plan.compute_dtype),
        eager_greedy_tokens=greedy_tokens(inputs, reference),
        greedy_tokens=greedy_tokens(inputs, logits),
    )


def raise_if_failed(parity: Parity, bucket: Bucket) -> None:
    """Raise CompileError with the figures of a failed check."""
    if not parity.passed:
        raise CompileError(
            f"{bucket.name} failed its parity check: compiled logits differ from transformers' by "
            f"{parity.max_difference:.3g}, {parity.relative_difference:.2g} of the largest "
            f"(tolerance {parity.tolerance:g}), KL {parity.kl:.2g} nats (tolerance {parity.kl_tolerance:g})",
            "find the part with --region blocks --mode default, then --attention reference",
        )


def _checked_rows(batch: WarmupBatch) -> list[int]:
    """All prompts of a prefill; of a decode batch the first, the last and two between."""
    count = len(batch.sequences)
    last = count - 1
    if batch.bucket.is_prefill or count <= MAX_CHECKED_ROWS:
        return list(range(count))
    return sorted({0, last // 3, 2 * last // 3, last})


def _logits_in_two_chunks(batch: WarmupBatch) -> Tensor:
    """Logits [vocab] after the first prompt, prefilled in two chunks."""
    runner, bucket, sequence = batch.runner, batch.bucket, batch.sequences[0]
    length = len(sequence.token_ids)
    runner.prefill([Chunk(sequence, 0, length // 2)], bucket=bucket)
    return runner.prefill([Chunk(sequence, length // 2, length)], bucket=bucket).logits[0].clone()
