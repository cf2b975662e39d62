"""Sampling and log-probabilities in plain torch: the reference of the Triton kernels, and the backend of CPUs.

The cumulative distribution is built in two short levels. The limit of top-k and top-p is found by sorting.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.kernels.sampling.rows import Features, SamplingRows
from tcdeploy.kernels.sampling.weights import (
    natural_log,
    relative_weights,
    sortable,
    to_units,
    uniforms,
    unit_bits,
)

MAX_ROWS_PER_PASS = 64  # bounds temporary memory
CHUNK = 256  # tokens per chunk of the two-level cumulative distribution
MAX_TOKEN_ID = 2**31 - 1  # the lower 32 bits of a rank (row_kernels.py) are MAX_TOKEN_ID - id


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities, of n rows and k alternatives each."""

    chosen: Tensor  # [n] float32
    top_ids: Tensor  # [n, k] int64, most likely first, then lowest id
    top_logprobs: Tensor  # [n, k] float32


def sample(
    logits: Tensor, sampling: SamplingRows, rows: Tensor, positions: Tensor, features: Features, masks: Tensor | None
) -> Tensor:
    """As `sampling.sample` (engine/step/sampling.py)."""
    tokens = []
    for start in range(0, len(rows), MAX_ROWS_PER_PASS):
        part = slice(start, start + MAX_ROWS_PER_PASS)
        part_masks = masks[part] if masks is not None else None
        tokens.append(_sample(logits[part], sampling, rows[part], positions[part], features, part_masks))
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)


def _sample(
    logits: Tensor, sampling: SamplingRows, rows: Tensor, positions: Tensor, features: Features, masks: Tensor | None
) -> Tensor:
    scores = _apply_biases(logits, sampling, rows, positions) if features.biases else logits
    scores = _apply_penalties(scores, sampling, rows) if features.penalties else scores
    scores = _apply_masks(scores, masks) if masks is not None else scores
    best = scores.argmax(dim=-1, keepdim=True)  # [n, 1]; NaN counts as the largest, as in all of torch
    top = scores.gather(1, best).double()
    temperature = sampling.temperature[rows, None].double()
    is_drawn = (temperature > 0) & top.isfinite()
    weights = relative_weights(scores, top, torch.where(temperature > 0, temperature, 1.0))
    if features.filters:
        weights *= _filter_mask(scores, weights, sampling, rows)
    drawn = draw(weights, uniforms(sampling.seeds[rows], positions)[:, None])
    return torch.where(is_drawn, drawn, best)[:, 0]


def _apply_biases(logits: Tensor, sampling: SamplingRows, rows: Tensor, positions: Tensor) -> Tensor:
    """Logits in float32 plus biases. Logits without a bias are bit-identical."""
    applies = positions[:, None] < sampling.bias_ends[rows]
    added = torch.where(applies, sampling.bias_values[rows], 0.0)
    return logits.float().scatter_add(1, sampling.bias_ids[rows], added)


def _apply_penalties(logits: Tensor, sampling: SamplingRows, rows: Tensor) -> Tensor:
    """Logits in float32 minus penalties. Neutral penalties leave them bit-identical."""
    counts = sampling.output_counts[rows]
    is_generated = counts > 0
    scale = torch.where(is_generated | sampling.in_prompt[rows], sampling.repetition[rows, None], 1.0)
    scores = logits.float()
    scores = torch.where(scores > 0, scores / scale, scores * scale)
    scores -= sampling.frequency[rows, None] * counts
    scores -= sampling.presence[rows, None] * is_generated
    return scores


def _apply_masks(scores: Tensor, masks: Tensor) -> Tensor:
    """-inf where a bit is not set, also for NaN. Unpacked as bytes, so the temporary takes one byte per token."""
    bits = torch.arange(8, dtype=torch.uint8, device=masks.device)
    # Assumes little-endian words, as on every host with a GPU.
    allowed = (masks.view(torch.uint8)[:, :, None] >> bits) & 1
    return scores.where(allowed.flatten(1)[:, : scores.shape[1]].bool(), -torch.inf)


def _filter_mask(scores: Tensor, weights: Tensor, sampling: SamplingRows, rows: Tensor) -> Tensor:
    """Whether each token passes its row's filters, [n, vocab].

    Top-k and top-p keep the first tokens in sorted order, and the last kept token defines the mask in the order of ids.
    Drawing in that order makes a row's tokens independent of whether other rows have filters.
    """
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    places = token_ids = torch.arange(scores.shape[1], device=scores.device)  # in `ordered`, and in `scores`
    top_k, top_p = sampling.top_k[rows, None], sampling.top_p[rows, None]
    limit = torch.where(top_k > 0, top_k, scores.shape[1]).clamp(max=scores.shape[1])
    last = torch.where(top_p < 1, _top_p_last_place(weights.gather(1, ids) * (places < limit), top_p), limit - 1)
    edge, edge_id = ordered.gather(1, last), ids.gather(1, last)
    is_kept = (scores > edge) | ((scores == edge) & (token_ids <= edge_id))
    return is_kept & (weights >= sampling.min_p[rows, None])


def _top_p_last_place(ordered: Tensor, top_p: Tensor) -> Tensor:
    """First index in sorted order at which the weights [n, vocab] sum to the fraction top_p [n, 1], as [n, 1]."""
    cumulative = accumulate(ordered)
    target = (top_p.double() * cumulative.total.double()).ceil().long() - 1
    return cumulative.first_exceeding(target.clamp(min=0))


class Cumulative(NamedTuple):
    """A distribution over tokens in integer units, cumulated over chunks of CHUNK tokens."""

    units: Tensor  # [n, chunks, CHUNK] int64
    ends: Tensor  # [n, chunks] int64: cumulative units at the end of each chunk
    vocab_size: int

    @property
    def total(self) -> Tensor:
        return self.ends[:, -1:]

    def first_exceeding(self, target: Tensor) -> Tensor:
        """First token whose cumulative units exceed `target` [n, 1], as [n, 1]; a valid id for any target."""
        chunk = torch.searchsorted(self.ends, target, right=True).clamp(max=self.ends.shape[1] - 1)
        units = self.units.gather(1, chunk[:, :, None].expand(-1, 1, CHUNK))[:, 0]
        inside = units.cumsum(dim=-1)
        before = self.ends.gather(1, chunk) - inside[:, -1:]
        token = chunk * CHUNK + torch.searchsorted(inside, target - before, right=True)
        return token.clamp(max=self.vocab_size - 1)


def accumulate(weights: Tensor) -> Cumulative:
    """Convert weights [n, vocab] float64 in [0, 1] to integer units, and cumulate them. Overwrites the weights."""
    size, vocab_size = weights.shape
    chunks = -(-vocab_size // CHUNK)
    units = torch.empty(size, chunks * CHUNK, dtype=torch.int64, device=weights.device)
    units[:, vocab_size:] = 0
    units[:, :vocab_size] = weights.mul_(2.0 ** unit_bits(vocab_size))
    units = units.view(size, chunks, CHUNK)
    return Cumulative(units, units.sum(dim=-1).cumsum(dim=-1), vocab_size)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token at the quantile `uniform` [n, 1] float64 of the weights [n, vocab], as [n, 1]."""
    cumulative = accumulate(weights)
    total = cumulative.total
    target = (uniform * total.double()).long()
    return cumulative.first_exceeding(torch.minimum(target, total - 1))  # the product may round up to the total


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """As `sampling.logprobs` (engine/step/sampling.py).

    `torch.topk` does not define the order of equal values, which are common in bfloat16. It is applied to distinct
    integers instead, so the first token is the greedy one.
    """
    scores = logits.float()
    ids = torch.arange(scores.shape[1], device=scores.device)
    ranked = ((sortable(scores) << 32) | (MAX_TOKEN_ID - ids)).topk(max(k, 1), dim=-1).values
    top_ids = MAX_TOKEN_ID - (ranked & MAX_TOKEN_ID)
    top = scores.gather(1, top_ids[:, :1]).double()
    units = to_units(relative_weights(scores, top, torch.ones_like(top))).sum(dim=-1, keepdim=True)
    log_total = natural_log(units.double() * 2.0 ** -unit_bits(scores.shape[1]))
    log_total = torch.where(top.isfinite(), log_total, torch.nan)
    chosen, alternatives = (scores.gather(1, i).double() - top - log_total for i in (tokens[:, None], top_ids[:, :k]))
    return Logprobs(chosen[:, 0].float(), top_ids[:, :k], alternatives.float())
