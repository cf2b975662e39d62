"""Compares a bucket's logits with those of transformers' own attention on the same weights, uncompiled.

The reference shares nothing with the bucket but the weights: no compiled program, no paged cache and none of our ops.
It reads slices of the packed weights (models/packed_linears.py), one matrix product each. It runs each sequence alone,
from its first token, and gives the logits of the last token (`ModelRunner.reference_logits`).
"""

from __future__ import annotations

import hashlib

from torch import Tensor

from tcdeploy.cache.manifest import GreedyTokens, Parity
from tcdeploy.planning.architecture import Architecture

# By compute dtype: (difference as a share of the largest reference logit, KL divergence in nats). In float32 only the
# order of sums differs: 1e-6 and 1e-7 at most. bfloat16 rounds in every layer: 0.07 and 4e-3 for Llama 3.1 8B with
# random weights.
TOLERANCE = {"float32": (1e-3, 1e-5), "float16": (5e-2, 1e-2), "bfloat16": (1e-1, 2e-2)}


def reference_attn_implementation(architecture: Architecture) -> str:
    """The attention implementation of the reference: sdpa, or eager if the model needs soft-capping or sinks."""
    plain = all(not spec.softcap and not spec.has_sinks for spec in architecture.attention_layers)
    return "sdpa" if plain else "eager"


def compare_logits(logits: Tensor, reference: Tensor, dtype: str) -> Parity:
    """Compare logits [rows, vocab] of a bucket with the reference. A NaN on either side fails the check."""
    difference = (logits.float() - reference).abs().max().item()
    relative = difference / max(reference.abs().max().item(), 1e-30)
    log_p, log_q = reference.log_softmax(dim=-1), logits.float().log_softmax(dim=-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1).max().clamp(min=0).item()  # rounding may leave it below 0
    tolerance, kl_tolerance = TOLERANCE[dtype]
    passed = relative <= tolerance and kl <= kl_tolerance
    return Parity(logits.shape[0], difference, relative, kl, tolerance, kl_tolerance, passed)


def greedy_tokens(inputs: list[list[int]], logits: Tensor) -> GreedyTokens:
    """The most likely token of each row of `logits` [rows, vocab], which followed that row's token ids."""
    likeliest = logits.float().log_softmax(dim=-1).max(dim=-1)
    digest = hashlib.sha256(repr(inputs).encode()).hexdigest()
    return GreedyTokens(digest, tuple(likeliest.indices.tolist()), tuple(likeliest.values.tolist()))
