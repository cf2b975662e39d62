"""Samples the next token of every row on the device: greedy, or drawn with a seed per request.

A draw is a pure function. Row r at position p takes one uniform number `hash(seed, p)` and inverts the cumulative
distribution with it. The same logits, seed and position therefore give the same token in any batch, after a preemption,
on a CPU or a GPU. Nothing here reads a value on the host and all shapes are static, so sampling never makes the host
wait. Unused `Features` cost nothing.

Weights are exponentials in float64, truncated to integer units of which the largest weight has 2^45 (vocabulary of
128,256; see `accumulate`). Integer sums do not depend on the order of addition, so the cumulative distribution is built
in two short levels, never decreases, and never selects a token of weight 0, not even at u = 0 or u = 1. Weights smaller
than one unit count as 0: in total less than 2^-28 of the largest weight.

Order of operations, on the raw logits of the model:

1. biases: added to single logits; -inf for a stop token before `min_tokens`
2. penalties: repetition over prompt and output (positive logits divided, negative ones multiplied), then frequency *
   count and presence * (count > 0) over the output only (vLLM, `vllm/v1/sample/sampler.py`; OpenAI API)
3. masks: -inf for a token that the row's constraint excludes
4. temperature 0 ends here: argmax, with the lowest id among equal logits
5. temperature, top-k, top-p over what top-k left, min-p relative to the largest probability (transformers,
   `GenerationMixin._get_logits_processor`; vLLM applies min-p before top-p, which makes top-p slightly stricter)

Among equal logits at the limit of top-k or top-p the lowest ids are kept, so top-k keeps exactly k tokens; transformers
and vLLM keep every logit that equals the k-th. Unusable logits: a row of only -inf gives token 0, a row with +inf the
first +inf, a row with NaN the first NaN. Other rows are not affected.

Rejected: the exponential (Gumbel) race of vLLM and gpt-fast, which needs one hash per vocabulary entry instead of one
per row; `torch.multinomial`, whose state is a generator; one `cumsum` over the vocabulary, which takes longer (264 us,
32 rows on an H100) than all of `sample` without filters. Timings: docs/performance-log.md.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.engine.schedule.sequence import MAX_LOGIT_BIASES

MAX_ROWS_PER_PASS = 64  # bounds temporary memory: a third of that of 256 rows at once (docs/performance-log.md)
CHUNK = 256  # tokens per chunk of the two-level cumulative distribution
COUNT_LIMIT = 2**15 - 1
MAX_TOKEN_ID = 2**31 - 1  # the lower 32 bits of a rank are MAX_TOKEN_ID - id


class Features(NamedTuple):
    """Features that any row of the batch uses. A row's tokens do not depend on the features of other rows."""

    penalties: bool  # repetition, presence or frequency
    filters: bool  # top-k, top-p or min-p
    biases: bool = False
    masks: bool = False  # constrained rows


@dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters and penalty counts of each decode row: static tensors that the host writes on admission."""

    temperature: Tensor  # [max batch + 1] float32; 0 is greedy
    top_k: Tensor  # [max batch + 1] int64; 0 keeps all
    top_p: Tensor  # [max batch + 1] float32
    min_p: Tensor  # [max batch + 1] float32
    seeds: Tensor  # [max batch + 1] int64
    repetition: Tensor  # [max batch + 1] float32
    presence: Tensor  # [max batch + 1] float32
    frequency: Tensor  # [max batch + 1] float32
    output_counts: Tensor  # [max batch + 1, vocab] int16: occurrences in the output, at most COUNT_LIMIT
    in_prompt: Tensor  # [max batch + 1, vocab] bool
    bias_ids: Tensor  # [max batch + 1, MAX_LOGIT_BIASES] int64
    bias_values: Tensor  # [max batch + 1, MAX_LOGIT_BIASES] float32: added to the logit of that id
    bias_ends: Tensor  # [max batch + 1, MAX_LOGIT_BIASES] int64: first position at which the bias no longer applies

    def tensors_to_gather(self, features: Features) -> list[Tensor]:
        """Tensors to gather when rows move: the one-dimensional ones, and the wide ones whose feature is used."""
        penalties = [self.output_counts, self.in_prompt] if features.penalties else []
        biases = [self.bias_ids, self.bias_values, self.bias_ends] if features.biases else []
        return [tensor for tensor in vars(self).values() if tensor.ndim == 1] + penalties + biases


class Logprobs(NamedTuple):
    chosen: Tensor  # [n] float32
    top_ids: Tensor  # [n, k] int64, most likely first, then lowest id
    top_logprobs: Tensor  # [n, k] float32


def make_sampling_rows(num_rows: int, vocab_size: int, device: torch.device | str) -> SamplingRows:
    """Rows that sample greedily, without penalties, filters or biases."""

    def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.full((num_rows, *shape), value, dtype=dtype, device=device)

    return SamplingRows(
        temperature=full(0, torch.float32),
        top_k=full(0, torch.int64),
        top_p=full(1, torch.float32),
        min_p=full(0, torch.float32),
        seeds=full(0, torch.int64),
        repetition=full(1, torch.float32),
        presence=full(0, torch.float32),
        frequency=full(0, torch.float32),
        output_counts=full(0, torch.int16, vocab_size),
        in_prompt=full(False, torch.bool, vocab_size),
        bias_ids=full(0, torch.int64, MAX_LOGIT_BIASES),
        bias_values=full(0, torch.float32, MAX_LOGIT_BIASES),
        bias_ends=full(0, torch.int64, MAX_LOGIT_BIASES),
    )


def row_seed(seed: int | None) -> int:
    """A request's seed as a signed 64-bit integer; a random one for None."""
    bits = secrets.randbits(64) if seed is None else seed % 2**64
    return bits - 2**64 if bits >= 2**63 else bits


def to_device(values: Sequence[float] | Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy through pinned memory, which torch keeps alive until the copy is done. The host does not wait."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def set_penalty_history(sampling: SamplingRows, row: int, prompt_ids: list[int], output_ids: list[int]) -> None:
    """Replace the tokens that a row's penalties count. The host does not wait for the upload."""
    device = sampling.in_prompt.device
    prompt, output = (to_device(ids, torch.int64, device) for ids in (prompt_ids, output_ids))
    sampling.in_prompt[row].zero_().index_fill_(0, prompt, True)
    counts = torch.zeros(sampling.in_prompt.shape[1], dtype=torch.int32, device=device)
    counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
    sampling.output_counts[row].copy_(counts.clamp(max=COUNT_LIMIT))


def set_biases(sampling: SamplingRows, row: int, biases: list[tuple[int, float, int]]) -> None:
    """Replace a row's biases: at most MAX_LOGIT_BIASES of (token id, value, first position without it)."""
    padded = biases + [(0, 0.0, 0)] * (MAX_LOGIT_BIASES - len(biases))
    targets = (sampling.bias_ids, sampling.bias_values, sampling.bias_ends)
    for target, values in zip(targets, zip(*padded, strict=True), strict=True):
        values_on_host = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
        target[row].copy_(values_on_host, non_blocking=True)


def count_tokens(sampling: SamplingRows, rows: Tensor, tokens: Tensor) -> None:
    """Count one token in each of `rows` [n], up to COUNT_LIMIT; inexact in a repeated row, the padding row."""
    counts = sampling.output_counts[rows, tokens]
    sampling.output_counts[rows, tokens] = torch.where(counts < COUNT_LIMIT, counts + 1, counts)


def sample(
    logits: Tensor, sampling: SamplingRows, positions: Tensor, features: Features, rows: Tensor | None = None,
    masks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The next token of each row of logits [n, vocab], as [n] int64. No host synchronisation.

    `rows` [n] int64 are indices into `sampling`; None: the first n rows. `positions` [n] int64 are those that the
    tokens will have. `masks` [n, ceil(vocab / 32)] int32, if `features.masks` is set, allow token t if bit t % 32 of
    word t // 32 is set.
    """
    size, tokens = logits.shape[0], []
    for start in range(0, size, MAX_ROWS_PER_PASS):
        part = slice(start, start + MAX_ROWS_PER_PASS)
        part_rows = slice(start, min(part.stop, size)) if rows is None else rows[part]
        part_masks = masks[part] if masks is not None else None
        tokens.append(_sample(logits[part], sampling, part_rows, positions[part], features, part_masks))
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)


def _sample(
    logits: Tensor, sampling: SamplingRows, rows: slice | Tensor, positions: Tensor, features: Features,
    masks: Tensor | None,
) -> Tensor:  # fmt: skip
    scores = _apply_biases(logits, sampling, rows, positions) if features.biases else logits
    scores = _apply_penalties(scores, sampling, rows) if features.penalties else scores
    scores = _apply_masks(scores, masks) if masks is not None else scores
    best = scores.argmax(dim=-1, keepdim=True)  # [n, 1]; NaN counts as the largest, as in all of torch
    top = scores.gather(1, best).double()
    temperature = sampling.temperature[rows, None].double()
    is_drawn = (temperature > 0) & top.isfinite()
    safe_temperature = torch.where(temperature > 0, temperature, 1.0)
    weights = _relative_probs(scores, top, safe_temperature)
    if features.filters:
        weights *= _filter_mask(scores, weights, top, safe_temperature, sampling, rows)
    drawn = draw(weights, uniforms(sampling.seeds[rows], positions)[:, None])
    return torch.where(is_drawn, drawn, best)[:, 0]


def _apply_biases(logits: Tensor, sampling: SamplingRows, rows: slice | Tensor, positions: Tensor) -> Tensor:
    """Logits in float32 plus biases. Logits without a bias are bit-identical."""
    applies = positions[:, None] < sampling.bias_ends[rows]
    added = torch.where(applies, sampling.bias_values[rows], 0.0)
    return logits.float().scatter_add(1, sampling.bias_ids[rows], added)


def _apply_penalties(logits: Tensor, sampling: SamplingRows, rows: slice | Tensor) -> Tensor:
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


def _relative_probs(scores: Tensor, top: Tensor, safe_temperature: Tensor) -> Tensor:
    """Probabilities relative to the largest: float64 in [0, 1], and 1 for the most likely token."""
    return (scores - top).div_(safe_temperature).exp_()


def _filter_mask(
    scores: Tensor, weights: Tensor, top: Tensor, safe_temperature: Tensor, sampling: SamplingRows, rows: slice | Tensor
) -> Tensor:
    """Whether each token passes its row's filters, [n, vocab].

    Top-k and top-p keep the first tokens in sorted order, and the last kept token defines the mask in the order of ids.
    Drawing in that order makes a row's tokens independent of whether other rows have filters.
    """
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    ranks = token_ids = torch.arange(scores.shape[1], device=scores.device)  # of `ordered`, and of `scores`
    top_k, top_p = sampling.top_k[rows, None], sampling.top_p[rows, None]
    limit = torch.where(top_k > 0, top_k, scores.shape[1]).clamp(max=scores.shape[1])
    last = torch.where(
        top_p < 1, _top_p_last_rank(_relative_probs(ordered, top, safe_temperature) * (ranks < limit), top_p), limit - 1
    )
    edge, edge_id = ordered.gather(1, last), ids.gather(1, last)
    is_kept = (scores > edge) | ((scores == edge) & (token_ids <= edge_id))
    return is_kept & (weights >= sampling.min_p[rows, None])


def _top_p_last_rank(ordered: Tensor, top_p: Tensor) -> Tensor:
    """First rank at which the sorted weights [n, vocab] sum to the fraction top_p [n, 1], as [n, 1]."""
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
    """Convert weights [n, vocab] float64 in [0, 1] to integer units. Overwrites them. The sum stays below 2^62."""
    size, vocab_size = weights.shape
    chunks = -(-vocab_size // CHUNK)
    units = torch.empty(size, chunks * CHUNK, dtype=torch.int64, device=weights.device)
    units[:, vocab_size:] = 0
    units[:, :vocab_size] = weights.mul_(2.0 ** (62 - vocab_size.bit_length()))
    units = units.view(size, chunks, CHUNK)
    return Cumulative(units, units.sum(dim=-1).cumsum(dim=-1), vocab_size)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token at the quantile `uniform` [n, 1] float64 of the weights [n, vocab], as [n, 1]."""
    cumulative = accumulate(weights)
    total = cumulative.total
    target = (uniform * total.double()).long()
    return cumulative.first_exceeding(torch.minimum(target, total - 1))  # the product may round up to the total


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) for each seed and position, [n] float64 with 53 random bits.

    SplitMix64 (Steele, Lea, Flood 2014), with its constants as signed numbers, as int64 arithmetic wraps. The streams
    of seeds that differ by up to 2^20 start at least 2^40 steps apart.
    """
    bits = seeds * -0x2ECBDABC217D106B + positions * -0x61C8864680B583EB
    bits = (bits ^ _logical_shift_right(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _logical_shift_right(bits, 27)) * -0x6B2FB644ECCEEE15
    return _logical_shift_right(bits ^ _logical_shift_right(bits, 31), 11).double() * 2.0**-53


def _logical_shift_right(bits: Tensor, by: int) -> Tensor:
    """A logical right shift; torch's `>>` on int64 is arithmetic."""
    return (bits >> by) & (2 ** (64 - by) - 1)


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """Log-probabilities under the model, before penalties and temperature, of logits [n, vocab] and tokens [n] int64.

    `torch.topk` does not define the order of equal values, which are common in bfloat16. It is applied to distinct
    integers instead, so the first token is the greedy one.
    """
    scores = logits.float() + 0.0  # -0.0 becomes 0.0: equal values need the same bits
    total = scores.logsumexp(dim=-1, keepdim=True)
    bits = scores.view(torch.int32)
    order = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()  # integers that sort like the floats
    ids = torch.arange(scores.shape[1], device=scores.device)
    ranked = ((order << 32) | (MAX_TOKEN_ID - ids)).topk(k, dim=-1).values
    top_ids = MAX_TOKEN_ID - (ranked & MAX_TOKEN_ID)
    chosen = scores.gather(1, tokens[:, None]) - total
    return Logprobs(chosen[:, 0], top_ids, scores.gather(1, top_ids) - total)
