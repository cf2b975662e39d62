"""Chooses how many tokens a mixed step has: its decode rows and chunks of prompts. Does not import torch.

A large step completes prompts earlier, because it takes less time per token. But it delays the next token of every
sequence that decodes. Prompt tokens add least to the time of a small step: it is bound by reading the weights, which
the decode rows need anyway. The chosen size minimizes the following sum over the steps until all present prompts are
computed:

    FIRST_TOKEN_WEIGHT * number of prompts * milliseconds of the steps
    + number of decode rows * (milliseconds of the steps - milliseconds of as many decode steps)

Few rows or many prompts lead to large steps. The predicted time of a step is limited to the target (`--itl-target`).
The default is ITL_TARGET_DECODE_STEPS times the predicted time of a decode step of the same rows, and up to
MAX_TARGET_FACTOR times as much if there are more prompts than rows. This happens at the start of a burst, when larger
steps raise the throughput.

A step may exceed the target in two cases. It always has room for MIN_CHUNK_TOKENS prompt tokens, so that prompts
progress. And after a long prefix, attention may make even this smallest step about as long as the target, or longer;
then a step may take SMALLEST_STEP_FACTOR times as long as the smallest one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

from tcdeploy.engine.schedule.step_costs import StepPredictor
from tcdeploy.planning.attention import ITL_TARGET_DECODE_STEPS

# Weight of a delay of a prompt's first token, relative to the same delay of a decoding sequence's next token. In a
# simulation of an 8B shape (scripts/simulate-traffic, 12 requests/s, four seeds), the weights 5, 10, 20 and 40 lead to
# a median time to the first token of 48, 42, 41 and 41 ms, and a mean time per token of 7.6, 7.8, 7.9 and 8.2 ms.
FIRST_TOKEN_WEIGHT = 20
# Prompt tokens that a mixed step has room for, whatever the target. A step of so few tokens is bound by reading the
# weights: a smaller chunk would take as long, and a prompt would need more steps.
MIN_CHUNK_TOKENS = 32
# Limit of a step's predicted time, relative to the smallest step, if that exceeds the target. In a simulation of 16
# chats and prompts of 32,768 tokens (8B shape, before the keys of prompts were split), the factors 1.0, 1.1 and 1.2
# lead to a first token of these prompts after 11.1, 2.2 and 1.8 s, and to p99 gaps of the chats of 25.7, 26.4 and 28.0
# ms.
SMALLEST_STEP_FACTOR = 1.2
# In a simulation of 256 simultaneous requests, the factors 1, 2 and 3 lead to 6,520, 6,680 and 6,690 tokens/s, and to
# a p99 gap between tokens of 38, 45 and 44 ms (docs/performance-log.md, "Under traffic").
MAX_TARGET_FACTOR = 2.0


class Backlog(NamedTuple):
    """The work from which the next step is chosen."""

    rows: int  # decode rows; at least 1
    row_context: int  # tokens in the KV cache, summed over the decode rows
    prompts: int  # that wait or are computed in part, the waiting ones limited to the free decode rows
    prompt_tokens: int  # of these prompts that are not computed yet; at least 1
    # Tokens of such a prompt that are already computed; the maximum over the prompts. It does not include tokens that a
    # waiting prompt will find in the prefix cache, so the first step of such a prompt may exceed the target.
    prefix: int


def choose_step_tokens(
    predictor: StepPredictor, backlog: Backlog, target_ms: float | None, min_chunk_tokens: int = MIN_CHUNK_TOKENS
) -> int:
    """Tokens of the next step, those of the decode rows included: one of the predictor's step sizes.

    `target_ms` None: the default. The step has room for `min_chunk_tokens` even if it then exceeds the target.
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
            target_ms *= target_factor(backlog.prompts, rows)
        limit_ms = max(target_ms / predictor.corrections["mixed"], SMALLEST_STEP_FACTOR * step_ms(sizes[smallest]))
        within_limit = bisect_right(sizes, limit_ms, smallest, largest + 1, key=step_ms)
        largest = max(smallest, within_limit - 1)

    def delay(size: int) -> float:
        """The sum of the module docstring, for steps of `size` tokens and a smaller last step."""
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


def target_factor(prompts: int, rows: int) -> float:
    """Multiplier of the default target: 1, or more if there are more prompts than decode rows."""
    return min(max(1.0, prompts / rows), MAX_TARGET_FACTOR)
