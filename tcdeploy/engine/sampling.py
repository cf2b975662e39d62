"""Choose the next token of every row of a batch, on the device: greedy, or drawn with a seed per request.

The one idea: a draw is a function, not an event. Row r at position p takes one uniform number, `hash(seed, p)`, and
inverts the cumulative distribution with it. So a request repeats its tokens whatever runs beside it, before or after a
pre-emption, on a CPU or a GPU, and there is no generator whose state could be lost.

The constraint: nothing here reads a value on the host, and all shapes are static, so a decode step may be recorded as
one CUDA graph. What a batch does not use costs nothing: the host knows its `Features`.

Where the accuracy comes from: weights are exponentials in float64, cut to whole units of which the largest weight has
2^45 (at 128,256 tokens; `accumulate`). Integers add up the same in any order, so the cumulated distribution may be
taken in two short levels, it never falls, and a token of weight 0 is never chosen, at u = 0 and u = 1 included.
Smaller weights than a unit count as 0: all of them together less than 2^-28 of the largest.

Order of operations, all on the raw logits of the model:

1. biases: what a request adds to single tokens' logits, -inf for a stop token that comes too soon
2. penalties: repetition over prompt and output (positive logits divided, others multiplied), then frequency * count
   and presence * (count > 0) over the output alone (vLLM, `vllm/v1/sample/sampler.py`; OpenAI API, "frequency and
   presence penalties")
3. masks: -inf for a token that the row's constraint forbids
4. temperature 0 ends here: the most likely token, the lowest id of equals
5. temperature, top-k, top-p of what top-k left, min-p as a share of the largest probability (transformers,
   `GenerationMixin._get_logits_processor`; vLLM has min-p before top-p, which then counts a little less)

Equal logits at the edge of top-k or top-p stay in by lowest id, so top-k keeps k tokens and never more; transformers
and vLLM keep all that equal the k-th. The most likely token always stays.

What a row of unusable logits gives: -inf everywhere, token 0; a +inf, the first; a NaN, the first NaN. Its neighbours
are not touched.

Rejected: the exponential (Gumbel) race of vLLM and gpt-fast, which needs a hash for each of 128,256 tokens instead of
one; `torch.multinomial`, whose state is a generator; one `cumsum` over the vocabulary, which gives each row a single
program (264 us for 32 rows on an H100, more than all that `sample` does there without filters, 238 us).
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tcdeploy.engine.sequence import MAX_LOGIT_BIASES

MAX_ROWS_PER_PASS = (
    64  # bounds the scratch; 256 rows of 128,256 at once: 0.5 to 1.4 GiB and 1.1 ms, so: a third and 1.6 ms
)
CHUNK = 256  # tokens of the second level of the cumulative distribution
COUNT_LIMIT = 2**15 - 1
MAX_TOKEN_ID = 2**31 - 1  # ids count down from it in the lower half of a rank


class Features(NamedTuple):
    """What some row of the batch asks for; a row's tokens do not depend on what the others ask for."""

    penalties: bool  # repetition, presence or frequency
    filters: bool  # top-k, top-p or min-p
    biases: bool = False
    masks: bool = False  # which tokens may come at all


@dataclass(frozen=True)
class SamplingRows:
    """How each decode row samples, and what its penalties count: static tensors that the host fills on admission."""

    temperature: Tensor  # [rows] float32; 0: greedy
    top_k: Tensor  # [rows] int64; 0: all
    top_p: Tensor  # [rows] float32
    min_p: Tensor  # [rows] float32
    seeds: Tensor  # [rows] int64
    repetition: Tensor  # [rows] float32
    presence: Tensor  # [rows] float32
    frequency: Tensor  # [rows] float32
    output_counts: Tensor  # [rows, vocab] int16: how often each token was generated, at most COUNT_LIMIT
    in_prompt: Tensor  # [rows, vocab] bool
    bias_ids: Tensor  # [rows, MAX_LOGIT_BIASES] int64
    bias_values: Tensor  # [rows, MAX_LOGIT_BIASES] float32: added to that token's logit
    bias_ends: Tensor  # [rows, MAX_LOGIT_BIASES] int64: the first position at which it no longer is

    def tensors_to_gather(self, features: Features) -> list[Tensor]:
        """What a row takes along when it moves: one number of each kind, and the wide ones that some row uses."""
        history, biases = (self.output_counts, self.in_prompt), (self.bias_ids, self.bias_values, self.bias_ends)
        numbers = [one for one in vars(self).values() if one.ndim == 1]
        return numbers + list(history if features.penalties else ()) + list(biases if features.biases else ())


class Logprobs(NamedTuple):
    chosen: Tensor  # [n] float32
    top_ids: Tensor  # [n, k] int64, most likely first, then lowest id
    top_logprobs: Tensor  # [n, k] float32


def make_sampling_rows(rows: int, vocab_size: int, device: torch.device | str) -> SamplingRows:
    """Neutral values: greedy, nothing penalised, nothing filtered."""

    def full(value: float, dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.full((rows, *shape), value, dtype=dtype, device=device)

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


def sampling_bytes(rows: int, vocab_size: int) -> int:
    """What `make_sampling_rows` takes of the device, asked of tensors that hold nothing."""
    return sum(field.nbytes for field in vars(make_sampling_rows(rows, vocab_size, "meta")).values())


def row_seed(seed: int | None) -> int:
    """A request's seed as `SamplingRows.seeds` holds it: 64 bits, signed; a fresh one for None."""
    bits = secrets.randbits(64) if seed is None else seed % 2**64
    return bits - 2**64 if bits >= 2**63 else bits


def set_penalty_history(sampling: SamplingRows, row: int, prompt_ids: list[int], output_ids: list[int]) -> None:
    """What the penalties of a row count from now on. The ids go up without making the host wait."""
    device, is_cuda = sampling.in_prompt.device, sampling.in_prompt.is_cuda
    prompt, output = (
        torch.tensor(ids, dtype=torch.int64, pin_memory=is_cuda).to(device, non_blocking=True)
        for ids in (prompt_ids, output_ids)
    )
    sampling.in_prompt[row].zero_().index_fill_(0, prompt, True)
    counts = torch.zeros(sampling.in_prompt.shape[1], dtype=torch.int32, device=device)
    counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))
    sampling.output_counts[row].copy_(counts.clamp(max=COUNT_LIMIT))


def set_biases(sampling: SamplingRows, row: int, biases: list[tuple[int, float, int]]) -> None:
    """What is added to the logits of a row: (token id, value, first position without it), MAX_LOGIT_BIASES at most."""
    is_cuda = sampling.bias_ids.is_cuda
    padded = biases + [(0, 0.0, 0)] * (MAX_LOGIT_BIASES - len(biases))
    for target, values in zip(
        (sampling.bias_ids, sampling.bias_values, sampling.bias_ends), zip(*padded, strict=True), strict=True
    ):
        target[row].copy_(torch.tensor(values, dtype=target.dtype, pin_memory=is_cuda), non_blocking=True)


def count_tokens(sampling: SamplingRows, rows: Tensor, tokens: Tensor) -> None:
    """Count a generated token in each of `rows` [n]; exact for distinct rows.

    A row that repeats (the dummy, where padding lands) may count less. The count stays at COUNT_LIMIT.
    """
    counts = sampling.output_counts[rows, tokens]
    sampling.output_counts[rows, tokens] = torch.where(counts < COUNT_LIMIT, counts + 1, counts)


def sample(
    logits: Tensor, sampling: SamplingRows, positions: Tensor, features: Features,
    rows: Tensor | None = None, masks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The next token of each row of logits [n, vocab], as [n] int64. No host synchronisation.

    `rows` [n] int64 says which entry of `sampling` each row follows; None: the first n, in order, without a copy.
    `positions` [n] int64 is where the token will stand in its sequence. `masks` [n, ceil(vocab / 32)] int32, where
    `features` has them: token t of a row may come where bit t % 32 of its word t // 32 is set.
    """
    size, drawn = logits.shape[0], []
    for start in range(0, size, MAX_ROWS_PER_PASS):
        part = slice(start, start + MAX_ROWS_PER_PASS)
        chosen = slice(start, min(part.stop, size)) if rows is None else rows[part]
        allowed = masks[part] if masks is not None else None
        drawn.append(_sample(logits[part], sampling, chosen, positions[part], features, allowed))
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def _sample(
    logits: Tensor, sampling: SamplingRows, rows: slice | Tensor, positions: Tensor, features: Features,
    masks: Tensor | None,
) -> Tensor:  # fmt: skip
    scores = _apply_biases(logits, sampling, rows, positions) if features.biases else logits
    scores = _apply_penalties(scores, sampling, rows) if features.penalties else scores
    scores = _apply_masks(scores, masks) if masks is not None else scores
    best = scores.argmax(dim=-1, keepdim=True)  # [n, 1]; a NaN counts as the largest, as everywhere in torch
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
    """The logits in float32 with what was asked added; where nothing was, they are as they were, to the bit."""
    holds = positions[:, None] < sampling.bias_ends[rows]
    added = torch.where(holds, sampling.bias_values[rows], 0.0)
    return logits.float().scatter_add(1, sampling.bias_ids[rows], added)


def _apply_penalties(logits: Tensor, sampling: SamplingRows, rows: slice | Tensor) -> Tensor:
    """The logits in float32 less their penalties; neutral penalties leave them as they are, to the bit."""
    counts = sampling.output_counts[rows]
    is_generated = counts > 0
    scale = torch.where(is_generated | sampling.in_prompt[rows], sampling.repetition[rows, None], 1.0)
    scores = logits.float()
    scores = torch.where(scores > 0, scores / scale, scores * scale)
    scores -= sampling.frequency[rows, None] * counts
    scores -= sampling.presence[rows, None] * is_generated
    return scores


def _apply_masks(scores: Tensor, masks: Tensor) -> Tensor:
    """-inf where a bit is not set; a NaN is forbidden like any other. Bytes, so the scratch is one for each token."""
    bits = torch.arange(8, dtype=torch.uint8, device=masks.device)
    allowed = (masks.view(torch.uint8)[:, :, None] >> bits) & 1  # little-endian words, as on every GPU's host
    return scores.where(allowed.flatten(1)[:, : scores.shape[1]].bool(), -torch.inf)


def _relative_probs(scores: Tensor, top: Tensor, safe_temperature: Tensor) -> Tensor:
    """Probabilities over the largest one: float64 in [0, 1], and 1 for the most likely."""
    return (scores - top).div_(safe_temperature).exp_()


def _filter_mask(
    scores: Tensor, weights: Tensor, top: Tensor, safe_temperature: Tensor, sampling: SamplingRows, rows: slice | Tensor
) -> Tensor:
    """Whether each token passes its row's filters, [n, vocab].

    Top-k and top-p keep a head of the sorted tokens. Its last token says who belongs to it in the order of ids, in
    which rows without filters draw: so a row's tokens do not depend on whether its neighbours have filters.
    """
    ordered, ids = scores.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(scores.shape[1], device=scores.device)
    top_k, top_p = sampling.top_k[rows, None], sampling.top_p[rows, None]
    limit = torch.where(top_k > 0, top_k, scores.shape[1]).clamp(max=scores.shape[1])
    last = torch.where(
        top_p < 1, _top_p_last_rank(_relative_probs(ordered, top, safe_temperature) * (ranks < limit), top_p), limit - 1
    )
    edge, edge_id = ordered.gather(1, last), ids.gather(1, last)
    is_head = (scores > edge) | ((scores == edge) & (ranks <= edge_id))
    return is_head & (weights >= sampling.min_p[rows, None])


def _top_p_last_rank(ordered: Tensor, top_p: Tensor) -> Tensor:
    """The rank at which the sorted weights [n, vocab] first reach their share top_p [n, 1], as [n, 1]."""
    cumulative = accumulate(ordered)
    wanted = (top_p.double() * cumulative.total.double()).ceil().long() - 1
    return cumulative.first_exceeding(wanted.clamp(min=0))


class Cumulative(NamedTuple):
    """A distribution over tokens in whole units, cumulated over chunks of CHUNK tokens."""

    units: Tensor  # [n, chunks, CHUNK] int64
    ends: Tensor  # [n, chunks] int64: units up to the end of each chunk
    vocab_size: int

    @property
    def total(self) -> Tensor:
        return self.ends[:, -1:]

    def first_exceeding(self, wanted: Tensor) -> Tensor:
        """The first token at which the cumulated units exceed `wanted` [n, 1], as [n, 1]; in range for any units."""
        chunk = torch.searchsorted(self.ends, wanted, right=True).clamp(max=self.ends.shape[1] - 1)
        units = self.units.gather(1, chunk[:, :, None].expand(-1, 1, CHUNK))[:, 0]
        inside = units.cumsum(dim=-1)
        before = self.ends.gather(1, chunk) - inside[:, -1:]
        token = chunk * CHUNK + torch.searchsorted(inside, wanted - before, right=True)
        return token.clamp(max=self.vocab_size - 1)


def accumulate(weights: Tensor) -> Cumulative:
    """Weights [n, vocab] float64 in [0, 1] as units; overwrites them. Their sum stays below 2^62."""
    size, vocab_size = weights.shape
    chunks = -(-vocab_size // CHUNK)
    units = torch.empty(size, chunks * CHUNK, dtype=torch.int64, device=weights.device)
    units[:, vocab_size:] = 0
    units[:, :vocab_size] = weights.mul_(2.0 ** (62 - vocab_size.bit_length()))
    units = units.view(size, chunks, CHUNK)
    return Cumulative(units, units.sum(dim=-1).cumsum(dim=-1), vocab_size)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """The token at share `uniform` [n, 1] float64 of the cumulated weights [n, vocab], as [n, 1]."""
    cumulative = accumulate(weights)
    total = cumulative.total
    wanted = (uniform * total.double()).long()
    return cumulative.first_exceeding(torch.minimum(wanted, total - 1))  # the product may round up to the total


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """One number in [0, 1) for each seed and position, [n] float64 of 53 random bits.

    SplitMix64 (Steele, Lea, Flood 2014): a counter times an odd constant, mixed. Each seed counts from a start of its
    own, 2^40 and more steps from those of its million neighbours. int64 wraps; the constants are its signed ones.
    """
    bits = seeds * -0x2ECBDABC217D106B + positions * -0x61C8864680B583EB
    bits = (bits ^ _logical_shift_right(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _logical_shift_right(bits, 27)) * -0x6B2FB644ECCEEE15
    return _logical_shift_right(bits ^ _logical_shift_right(bits, 31), 11).double() * 2.0**-53


def _logical_shift_right(bits: Tensor, by: int) -> Tensor:
    """A logical shift to the right: torch's copies the sign."""
    return (bits >> by) & (2 ** (64 - by) - 1)


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> Logprobs:
    """Log-probabilities of the model itself, before penalties and temperature, as OpenAI's API means them.

    logits [n, vocab], tokens [n] int64, 0 <= k <= vocab. `torch.topk` promises no order of equal logits, and bfloat16
    has many, so it ranks integers of which no two are equal: the most likely token here is the greedy one.
    """
    scores = logits.float() + 0.0  # -0.0 becomes 0.0, which has another bit pattern and is equal
    total = scores.logsumexp(dim=-1, keepdim=True)
    bits = scores.view(torch.int32)
    order = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).long()  # integers in the order of the floats
    ids = torch.arange(scores.shape[1], device=scores.device)
    ranked = ((order << 32) | (MAX_TOKEN_ID - ids)).topk(k, dim=-1).values
    top_ids = MAX_TOKEN_ID - (ranked & MAX_TOKEN_ID)
    chosen = scores.gather(1, tokens[:, None]) - total
    return Logprobs(chosen[:, 0], top_ids, scores.gather(1, top_ids) - total)
