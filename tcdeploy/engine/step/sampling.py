"""Samples the next token of every row on the device: greedy, or drawn with a seed per request.

A draw is a pure function. Row r at position p takes one uniform number `hash(seed, p)` and inverts the cumulative
distribution with it. The same logits, seed and position therefore give the same token in any batch, after a preemption,
on a CPU or a GPU. Nothing here reads a value on the host and all shapes are static, so sampling never makes the host
wait. Unused `Features` cost nothing.

Weights are exponentials in float64, truncated to integer units of which the largest weight has 2^45 (vocabulary of
128,256; see kernels/sampling/weights.py). Integer sums do not depend on the order of addition, so the cumulative
distribution never decreases, and never selects a token of weight 0, not even at u = 0 or u = 1. Weights smaller than
one unit count as 0: in total less than 2^-28 of the largest weight.

There are two backends with equal tokens: `reference` is plain torch, `triton` is in kernels/sampling/sample_triton.py.

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
per row; `torch.multinomial`, whose state is a generator. Timings: docs/performance-log.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from tcdeploy.engine.schedule.sequence import MAX_LOGIT_BIASES
from tcdeploy.kernels.sampling import logprobs_triton, reference, sample_triton
from tcdeploy.kernels.sampling.reference import Logprobs
from tcdeploy.kernels.sampling.rows import FLOATS, INTEGERS, Features, SamplingRows

Backend = Literal["reference", "triton"]
COUNT_LIMIT = 2**15 - 1


def to_device(
    values: Sequence[float] | Sequence[tuple[float, ...]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Copy through pinned memory, which torch keeps alive until the copy is done. The host does not wait."""
    if device.type != "cuda":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def set_scalars(sampling: SamplingRows, rows: list[int], values: Sequence[Mapping[str, float]]) -> None:
    """Write FLOATS and INTEGERS of some rows, in two uploads for any number of rows."""
    for names, target in ((FLOATS, sampling.floats), (INTEGERS, sampling.integers)):
        # The index is sent with the values: float32 is exact up to 2^24 rows.
        columns = [(row, *(scalars[name] for name in names)) for row, scalars in zip(rows, values, strict=True)]
        uploaded = to_device(columns, target.dtype, target.device).T
        target.index_copy_(1, uploaded[0].long(), uploaded[1:])


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
    masks: Tensor | None = None, greedy: Tensor | None = None, backend: Backend = "reference",
) -> Tensor:  # fmt: skip
    """The next token of each row of logits [n, vocab], as [n] int64. No host synchronisation.

    `rows` [n] int64 are indices into `sampling`; None: the first n rows. `positions` [n] int64 are those that the
    tokens will have. `masks` [n, ceil(vocab / 32)] int32, if `features.masks` is set, allow token t if bit t % 32 of
    word t // 32 is set. `greedy` [n] int64 are the tokens of the largest logits, if they are known.
    """
    if rows is None:
        rows = torch.arange(len(logits), device=logits.device)
    if backend == "reference":
        return reference.sample(logits, sampling, rows, positions, features, masks)
    greedy = logits.argmax(dim=-1) if greedy is None else greedy
    return sample_triton.sample(logits, sampling, rows, positions, features, masks, greedy)


def logprobs(logits: Tensor, tokens: Tensor, k: int, backend: Backend = "reference") -> Logprobs:
    """Log-probabilities under the model, before penalties and temperature, of logits [n, vocab] and tokens [n] int64.

    Also of the k most likely tokens. NaN in a row whose largest logit is not finite.
    """
    return (reference if backend == "reference" else logprobs_triton).logprobs(logits, tokens, k)
