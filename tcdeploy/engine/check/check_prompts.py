"""The prompts on which buckets are checked against the reference.

All buckets are checked on prefixes of the same prompts of random tokens: a forward pass over a prompt gives the
reference logits of all of its prefixes, so the reference is computed once per start.

The first NUM_LONG_PROMPTS prompts fill prefill buckets; the rest are for decode batches, of which no two rows have the
same prompt: a row that reads the keys of another row must get other logits. They are a few blocks long, so that the
second block of a row is checked too, and their reference is one batched pass.

If the model has a sliding window that fits into the KV cache, one prefix is longer than the window. Other prefixes have
at most MAX_PROMPT_TOKENS tokens; a larger prefill bucket is filled with several of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.memory import CHECKED_BLOCKS, MAX_CHECKED_ROWS, MAX_PROMPT_TOKENS, checked_window
from tcdeploy.planning.plan import Bucket, Plan

NUM_LONG_PROMPTS = 3
FIRST_UNCHECKED_PROMPT = NUM_LONG_PROMPTS + MAX_CHECKED_ROWS  # of decode rows whose logits are not compared
NUM_LENGTHS = 6  # of decode rows
MIXED_ROWS = 2  # decode rows of a mixed step that is checked
BEYOND_WINDOW = 5  # tokens by which a sequence exceeds the sliding window


class PromptPrefix(NamedTuple):
    """The first `length` tokens of a prompt, which is given by its number.

    keeps_inputs: 1 if the plan quantises inputs of linear layers to FP8, but not those of the last token, because a
    decode step of few rows computes it; else 0.
    """

    prompt: int
    length: int
    keeps_inputs: int = 0


class CheckPrompts:
    """Chooses the prefixes on which each bucket of a plan is checked, and makes their tokens from `seed`."""

    def __init__(self, plan: Plan, architecture: Architecture, config: Any, seed: int) -> None:
        self._plan = plan
        self._seed = seed
        self._vocab_size = architecture.vocab_size
        self._excluded_tokens = special_token_ids(config.to_dict())
        window = checked_window(architecture, plan.context)
        self._long_length = window + BEYOND_WINDOW if window else 0

    def token_ids(self, prefix: PromptPrefix) -> list[int]:
        """Random tokens, equal for equal prefixes. Placeholders of images and other special tokens are left out."""
        source = random.Random(f"{self._seed} {prefix.prompt}")
        tokens: list[int] = []
        while len(tokens) < prefix.length:
            token = source.randrange(self._vocab_size)
            if token not in self._excluded_tokens or self._vocab_size <= len(self._excluded_tokens):
                tokens.append(token)
        return tokens

    def all_prefixes(self) -> list[PromptPrefix]:
        """The prefixes of all buckets whose logits are compared."""
        return sorted({
            prefix for bucket in self._plan.buckets for prefix in [*self.checked(bucket), *self.continued(bucket)]
        })  # fmt: skip

    def checked(self, bucket: Bucket) -> list[PromptPrefix]:
        """Those of `batch` whose logits are compared."""
        batch = self.batch(bucket)
        return [batch[row] for row in checked_rows(bucket, len(batch))]

    def batch(self, bucket: Bucket) -> list[PromptPrefix]:
        """Prefill: several packed prompts if they fit, else one. Decode: one sequence for each row."""
        if not bucket.is_prefill:
            return self._decode_batch(bucket)
        lengths = self._prefill_lengths(bucket)
        return [PromptPrefix(row % NUM_LONG_PROMPTS, length) for row, length in enumerate(lengths)]

    def continued(self, bucket: Bucket) -> list[PromptPrefix]:
        """The prefix that is checked in two chunks, of which the bucket computes the second. Empty for decode."""
        first = self.batch(bucket)[0]
        if not bucket.is_prefill or first.length < 2:
            return []
        return [first._replace(length=max(first.length, self._length_that_fits(self._long_length)))]

    def mixed_rows(self, bucket: Bucket) -> list[PromptPrefix]:
        """The checked prefixes that rows of a mixed step continue beside the chunk of `continued`; [] if none fits."""
        plan, continued = self._plan, self.continued(bucket)
        if not plan.mixed_steps or not continued:
            return []
        # Beside rows, the chunk needs a slot of its own.
        max_rows = plan.decode_buckets[-1].size - (1 if plan.slots else 0)
        rows = self.batch(bucket)[1 : 1 + min(MIXED_ROWS, max_rows)]
        return rows if self._blocks_for(prefix.length for prefix in [*continued, *rows]) < plan.kv_blocks else []

    def blocks_needed(self, bucket: Bucket) -> int:
        """KV blocks of the largest batch on which the bucket is checked."""
        batches = (self.batch(bucket), [*self.continued(bucket), *self.mixed_rows(bucket)])
        return max(self._blocks_for(prefix.length for prefix in batch) for batch in batches)

    def _prefill_lengths(self, bucket: Bucket) -> list[int]:
        """Three unequal prompts that leave padding, and further ones if their length is limited."""
        size, plan = bucket.size, self._plan
        lengths = [
            min(length, MAX_PROMPT_TOKENS) for length in (size - size // 4 - size // 8 - 1, size // 4, size // 8)
        ]
        while (rest := size - 1 - sum(lengths)) > size // 8 and len(lengths) < plan.max_prefill_sequences:
            lengths.append(min(rest, MAX_PROMPT_TOKENS))
        fits = plan.max_prefill_sequences >= len(lengths) and self._blocks_for(lengths) < plan.kv_blocks
        return lengths if size >= 8 and fits else [min(size, MAX_PROMPT_TOKENS)]

    def _decode_batch(self, bucket: Bucket) -> list[PromptPrefix]:
        """Checked rows have up to CHECKED_BLOCKS blocks if enough are free, and the first one more. Others have one.

        The first checked row may be long; the others have prompts of the batched pass.
        """
        plan = self._plan
        short = [_varied_length(row, min(plan.block_size, plan.context)) for row in range(bucket.size)]
        lengths, prompts = short.copy(), [FIRST_UNCHECKED_PROMPT + row for row in range(bucket.size)]
        for number, row in enumerate(checked_rows(bucket, bucket.size)):
            lengths[row] = _varied_length(number, min(CHECKED_BLOCKS * plan.block_size, plan.context))
            prompts[row] = NUM_LONG_PROMPTS + number - 1 if number else 0
        if self._blocks_for(lengths) >= plan.kv_blocks:
            lengths = short
        for first in (self._long_length, CHECKED_BLOCKS * plan.block_size + BEYOND_WINDOW):
            first = self._length_that_fits(first, lengths[1:])
            if first > lengths[0]:
                lengths[0] = first
                break
        keeps_inputs = int(plan.fp8_min_rows > 0 and not plan.quantises_inputs(bucket))
        return [PromptPrefix(*item, keeps_inputs) for item in zip(prompts, lengths, strict=True)]

    def _length_that_fits(self, length: int, others: Iterable[int] = ()) -> int:
        """`length`, limited by the context; 0 if the KV cache cannot hold it together with the other lengths."""
        length = min(length, self._plan.context)
        return length if self._blocks_for([length, *others]) < self._plan.kv_blocks else 0

    def _blocks_for(self, lengths: Iterable[int]) -> int:
        """KV blocks of sequences of these lengths. One block of the cache is for padding."""
        return sum(-(-length // self._plan.block_size) for length in lengths)


def _varied_length(number: int, most: int) -> int:
    """Another length of at most `most` tokens for each neighbour; few, as the reference has logits for each of them."""
    return most - number % NUM_LENGTHS * ((most - 2) // NUM_LENGTHS)


def checked_rows(bucket: Bucket, count: int) -> list[int]:
    """All prompts of a prefill; of a decode batch at most MAX_CHECKED_ROWS, the first and the last among them."""
    return list(range(count)) if bucket.is_prefill else evenly_spaced(count, MAX_CHECKED_ROWS)


def evenly_spaced(count: int, limit: int) -> list[int]:
    """At most `limit` numbers of 0..count-1, including the first and the last."""
    if count <= limit:
        return list(range(count))
    return [round(index * (count - 1) / (limit - 1)) for index in range(limit)]


def special_token_ids(config: dict[str, Any]) -> set[int]:
    """Token ids that a config names, also in the configs within it: bos, eos, padding, placeholders of images."""
    token_ids: set[int] = set()
    for name, value in config.items():
        if isinstance(value, dict):
            token_ids |= special_token_ids(value)
        elif str(name).endswith(("_token_id", "_token_index", "_token_ids")):
            token_ids |= {item for item in (value if isinstance(value, list) else [value]) if isinstance(item, int)}
    return token_ids
