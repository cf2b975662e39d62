"""Chooses how many tokens a mixed step has: decode rows, and chunks of prompts beside them. Does not import torch.

Large steps finish prompts earlier, since a token costs less in them. But they delay the next token of every sequence
that decodes, and a prompt token costs least in a small step: it is bound by reading the weights, which the decode rows
need anyway. A size is therefore chosen so that this sum is smallest, until all prompts that are here now are computed:

    FIRST_TOKEN_WEIGHT * (milliseconds of the steps, for each prompt)
    + (milliseconds by which the steps are longer than decode steps, for each decode row)

Few rows or many prompts lead to large steps. A step is predicted to take at most the target (`--itl-target`), except
that it always has room for a small chunk, so that prompts progress. Behind a long prefix even a small chunk may take
longer than the target, because of its attention; then a step may take SMALLEST_STEP_FACTOR times that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from tcdeploy.engine.step_costs import StepPredictor
from tcdeploy.planning.attention import ITL_TARGET_DECODE_STEPS

# A millisecond of a prompt that waits for its first token, as milliseconds of a sequence that waits for its next one.
# In a simulation of an 8B shape (scripts/simulate-traffic, 12 requests/s, four seeds), the weights 5, 10, 20 and 40
# lead to a median first token of 48, 42, 41 and 41 ms, and a mean time per token of 7.6, 7.8, 7.9 and 8.2 ms.
FIRST_TOKEN_WEIGHT = 20
# The least prompt tokens of a mixed step, whatever the target. A step of so few tokens is bound by reading the weights:
# a smaller chunk would take as long, and a prompt would need more steps.
MIN_CHUNK_TOKENS = 32
# In a simulation of 16 chats among which prompts of 32,768 tokens arrive (8B shape), 1.0, 1.1 and 1.2 lead to a first
# token after 11.1, 2.2 and 1.8 s, and to gaps between the tokens of the chats of 25.7, 26.4 and 28.0 ms (p99).
SMALLEST_STEP_FACTOR = 1.2


class Backlog(NamedTuple):
    """The decode rows, at least one, and the prompts that the next step may compute, at least one token.

    row_context: tokens in the KV cache of all decode rows together.
    prompts: number of prompts that wait or are computed in part, as far as decode rows are free.
    prompt_tokens: tokens of these prompts that no step has computed.
    prefix: the most tokens of one of them that earlier steps have computed. What the prefix cache will supply to a
        waiting prompt is not known, so its first step may exceed the target.
    """

    rows: int
    row_context: int
    prompts: int
    prompt_tokens: int
    prefix: int


def choose_step_tokens(
    predictor: StepPredictor, backlog: Backlog, target_ms: float | None, min_chunk_tokens: int = MIN_CHUNK_TOKENS
) -> int:
    """Tokens of the next step, those of the decode rows included: one of the predictor's step sizes.

    `target_ms`: limit of the predicted time; None: ITL_TARGET_DECODE_STEPS times the decode step of the same rows.
    """
    costs, rows = predictor.costs, backlog.rows
    sizes = predictor.step_sizes(rows)
    smallest = bisect_left(sizes, rows + min_chunk_tokens)
    holds_all = bisect_left(sizes, rows + backlog.prompt_tokens)
    largest = min(holds_all, len(sizes) - 1)
    decode_ms = costs.decode_ms(rows, backlog.row_context)

    def step_ms(size: int) -> float:
        return costs.mixed_ms(size, backlog.row_context, (size - rows) * backlog.prefix, backlog.prefix)

    if largest > smallest:
        if target_ms is None:
            target_ms = ITL_TARGET_DECODE_STEPS * decode_ms * predictor.corrections["decode"]
        limit_ms = max(target_ms / predictor.corrections["mixed"], SMALLEST_STEP_FACTOR * step_ms(sizes[smallest]))
        within_limit = bisect_right(sizes, limit_ms, smallest, largest + 1, key=step_ms)
        largest = max(smallest, within_limit - 1)

    def delay(size: int) -> float:
        """Until all prompts are computed, in steps of `size` tokens and a last, smaller one."""
        full_steps, rest = divmod(backlog.prompt_tokens, size - rows)
        total = full_steps * step_delay(size)
        return total + step_delay(predictor.padded_size(rows + rest, rows)) if rest else total

    def step_delay(size: int) -> float:
        ms = step_ms(size)
        return ms * backlog.prompts * FIRST_TOKEN_WEIGHT + (ms - decode_ms) * rows

    chosen, least = sizes[largest], delay(sizes[largest])
    for size in reversed(sizes[smallest:largest]):
        if (smaller := delay(size)) < least:
            chosen, least = size, smaller
    return chosen
