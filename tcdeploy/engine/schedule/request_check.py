"""Checks that a request can be served, before it is queued. Does not import torch."""

from __future__ import annotations

from tcdeploy.engine.schedule.blocks import BlockAllocator
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.errors import SpaceError, UsageError


def check_request(
    prompt: list[int], params: SamplingParams, vocab_size: int, context: int, allocator: BlockAllocator
) -> None:
    """Raises UsageError or SpaceError if the request can never be served."""
    if not prompt:
        raise UsageError("the prompt is empty", "pass at least one token; most tokenizers add one at the start")
    if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= vocab_size:
        raise UsageError(
            f"the prompt contains a value that is not a token id in 0..{vocab_size - 1}",
            "encode the prompt with the tokenizer of this model",
        )
    longest = len(prompt) + params.max_new_tokens
    if longest > context:
        raise UsageError(
            f"{len(prompt)} prompt tokens and {params.max_new_tokens} new tokens exceed the context of "
            f"{context} tokens",
            "shorten the prompt, or lower --max-new-tokens",
        )
    if allocator.blocks_for(longest) > allocator.capacity:
        raise SpaceError(
            f"{longest} tokens need {allocator.blocks_for(longest)} KV blocks; the cache has {allocator.capacity}",
            "raise --kv-blocks, or shorten the request",
        )
    biased_ids = [*params.stop_token_ids, *(token_id for token_id, _ in params.logit_bias)]
    if biased_ids and max(biased_ids) >= vocab_size and (params.logit_bias or params.min_new_tokens):
        raise UsageError(
            f"token id {max(biased_ids)} is outside the vocabulary 0..{vocab_size - 1}",
            "check stop_token_ids and logit_bias",
        )
