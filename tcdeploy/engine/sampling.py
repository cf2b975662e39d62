"""Choose the next token from a row of logits: greedy, or temperature, top-k, top-p with a seed per sequence.

One row at a time, for the handful of sequences of `generate`. Each sequence draws from a generator of its own, so a
seeded request gives the same tokens whatever runs beside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tcdeploy.engine.sequence import SamplingParams

LOWEST_TEMPERATURE = 1e-30  # below, float32 quotients of equal logits would be 0 / 0


def make_generator(params: SamplingParams, device: torch.device) -> torch.Generator | None:
    """The sequence's own source of randomness; None for greedy ones, which need none."""
    if params.temperature == 0:
        return None
    generator = torch.Generator(device=device)
    if params.seed is None:
        generator.seed()
    else:
        generator.manual_seed(params.seed)
    return generator


def sample(logits: Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """A token id drawn from logits [vocab]; the most likely token always stays in."""
    scores = (logits.float() - logits.max().float()) / max(params.temperature, LOWEST_TEMPERATURE)
    if params.top_k:
        kept = scores.topk(min(params.top_k, scores.shape[0])).indices
        scores = torch.full_like(scores, float("-inf")).scatter(0, kept, scores[kept])
    probabilities = scores.softmax(dim=-1)
    if params.top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        is_beyond = ordered.cumsum(dim=-1) - ordered >= params.top_p
        probabilities = probabilities.masked_fill(torch.zeros_like(is_beyond).scatter(0, order, is_beyond), 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
