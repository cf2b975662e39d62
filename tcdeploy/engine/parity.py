"""Is a bucket right? Its logits against the same weights run by transformers' own attention, uncompiled.

The reference shares nothing with what it judges but the weights: no compiled program, no paged cache, none of our ops.
Packed weights (models/packed_linears.py) it reads by slices, one product each. It runs each sequence alone, from its first
token, and gives the logits of the last.
"""

from __future__ import annotations

import hashlib
import inspect

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tcdeploy.attention.interface import ATTN_IMPLEMENTATION
from tcdeploy.cache.manifest import GreedyTokens, Parity
from tcdeploy.compiler.programs import force_eager
from tcdeploy.planning.architecture import Architecture

# (of the largest reference logit, KL in nats). float32 differs by the order of sums: measured 1e-6 and 1e-7 at most.
# bfloat16 rounds in every layer: an 8B shape with random weights measured 0.07 and 4e-3.
TOLERANCE = {"float32": (1e-3, 1e-5), "float16": (5e-2, 1e-2), "bfloat16": (1e-1, 2e-2)}


def reference_attn_implementation(architecture: Architecture) -> str:
    """sdpa, or transformers' eager formula where the model needs what sdpa lacks."""
    plain = all(not spec.softcap and not spec.has_sinks for spec in architecture.attention_layers)
    return "sdpa" if plain else "eager"


@torch.no_grad()
def reference_logits(model: PreTrainedModel, token_ids: list[int], attention: str) -> Tensor:
    """Logits [vocab] (float32) after the last of `token_ids`, by transformers alone."""
    ids = torch.tensor([token_ids], device=model.device)
    last_row = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    model.set_attn_implementation(attention)
    try:
        with force_eager():
            return model(input_ids=ids, use_cache=False, **last_row).logits[0, -1].float()
    finally:
        model.set_attn_implementation(ATTN_IMPLEMENTATION)


def check_parity(ours: Tensor, reference: Tensor, dtype: str) -> Parity:
    """Both [rows, vocab]. A NaN on either side never passes."""
    difference = (ours.float() - reference).abs().max().item()
    relative = difference / max(reference.abs().max().item(), 1e-30)
    log_p, log_q = reference.log_softmax(dim=-1), ours.float().log_softmax(dim=-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(dim=-1).max().clamp(min=0).item()  # rounding may leave it below 0
    tolerance, kl_tolerance = TOLERANCE[dtype]
    passed = relative <= tolerance and kl <= kl_tolerance
    return Parity(ours.shape[0], difference, relative, kl, tolerance, kl_tolerance, passed)


def greedy_tokens(inputs: list[list[int]], logits: Tensor) -> GreedyTokens:
    """The most likely token of each row of `logits` [rows, vocab], which followed that row's token ids."""
    likeliest = logits.float().log_softmax(dim=-1).max(dim=-1)
    digest = hashlib.sha256(repr(inputs).encode()).hexdigest()
    return GreedyTokens(digest, tuple(likeliest.indices.tolist()), tuple(likeliest.values.tolist()))
