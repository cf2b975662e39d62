"""Tokenizes texts within limits on time and memory.

A text of N characters has at least N / L tokens, where L is the length of the longest token. If N / L exceeds the
limit, the text is refused without tokenizing it. Large vocabularies have tokens of 128 spaces, so a text with more than
MANY_CHARS_PER_TOKEN characters per token of the limit is tokenized in pieces first, and refused as soon as these have
twice as many tokens as the limit. (Cutting a text adds only a few tokens.)

Long texts are tokenized by ENCODE_THREADS threads, while tokenizers releases the GIL. `encode_batch_fast` computes no
character offsets, which halves the time and the memory. Does not import torch.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tcdeploy.server.apis.openai.protocol import ApiError

ENCODE_THREADS = 2
MAX_SHORT_COST = 8192  # about 3 ms on the event loop
MANY_CHARS_PER_TOKEN = 8
PIECE_CHARS = 32 << 10
TRIM_COST = 1 << 20  # after a text of a higher cost, free memory is returned to the system
COMPOSED_CHARS = 4  # most characters that NFC and NFKC compose into one
# Steps of a tokenizer that neither drop nor merge characters, apart from Unicode composition.
LENGTH_PRESERVING_STEPS = ("ByteLevel", "Digits", "Metaspace", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Lowercase")
ResultT = TypeVar("ResultT")


class TooManyTokensError(ApiError):
    """A text has more tokens than the limit. `is_minimum`: tokenization stopped early; it may have more."""

    def __init__(self, problem: str, max_tokens: int, field: str, num_tokens: int, *, is_minimum: bool) -> None:
        super().__init__(400, f"{problem}; the limit is {max_tokens}", field, "context_length_exceeded")
        self.num_tokens, self.is_minimum = num_tokens, is_minimum


class TextEncoder:
    """Encodes texts with transformers' fast `tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()  # tokenizer.json may contain a limit, which would shorten prompts silently
        self._backend.no_padding()
        self.max_chars_per_token = max_chars_per_token(tokenizer)
        self._pool = ThreadPoolExecutor(ENCODE_THREADS, thread_name_prefix="tokenizer")

    async def encode(
        self, text: str, max_tokens: int, field: str, add_special_tokens: bool = True, num_kept: int | None = None
    ) -> list[int]:
        """The token ids of `text`. Raises TooManyTokensError, which names `field`, for more than `max_tokens`. Of
        these, the last `num_kept` are kept, with the special tokens that are added to the text, as in transformers.
        """
        if self.max_chars_per_token is not None and len(text) > max_tokens * self.max_chars_per_token:
            num_tokens = -(-len(text) // self.max_chars_per_token)
            problem = f"the text has {len(text)} characters, at least {num_tokens} tokens"
            raise TooManyTokensError(problem, max_tokens, field, num_tokens, is_minimum=True)
        cost = len(text) if text.isascii() else 4 * len(text)
        return await self.run(cost, self._encode, text, max_tokens, field, add_special_tokens, num_kept)

    async def run(self, cost: int, function: Callable[..., ResultT], *arguments: Any) -> ResultT:
        """Call `function` at once if `cost` (characters or tokens) is small, else in the thread pool."""
        if cost <= MAX_SHORT_COST:
            return function(*arguments)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, function, *arguments)
        finally:
            if cost > TRIM_COST:
                loop.run_in_executor(self._pool, trim_memory)

    def _encode(
        self, text: str, max_tokens: int, field: str, add_special_tokens: bool, num_kept: int | None = None
    ) -> list[int]:
        if len(text) > max(PIECE_CHARS, MANY_CHARS_PER_TOKEN * max_tokens):
            self._check_count_in_pieces(text, max_tokens, field)
        encoding = self._encode_fast(text, add_special_tokens)
        if len(encoding) > max_tokens:
            problem = f"the text has {len(encoding)} tokens"
            raise TooManyTokensError(problem, max_tokens, field, len(encoding), is_minimum=False)
        ids: list[int] = encoding.ids
        return ids if num_kept is None or len(ids) <= num_kept else _last_tokens(encoding, num_kept)

    def _check_count_in_pieces(self, text: str, max_tokens: int, field: str) -> None:
        count = 0
        for piece in _pieces(text):
            count += len(self._encode_fast(piece, False))
            if count > 2 * max_tokens:
                problem = f"the text has more than {max_tokens} tokens"
                raise TooManyTokensError(problem, max_tokens, field, max_tokens + 1, is_minimum=True)

    def _encode_fast(self, text: str, add_special_tokens: bool) -> Any:
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def _last_tokens(encoding: Any, num_kept: int) -> list[int]:
    """The last tokens of an encoded text, between the special tokens that were added to it: `num_kept` in all."""
    ids, is_added = encoding.ids, encoding.special_tokens_mask
    start = is_added.index(0) if 0 in is_added else len(ids)
    stop = len(ids) - (is_added[::-1].index(0) if 0 in is_added else 0)
    num_text_tokens = num_kept - start - (len(ids) - stop)
    if num_text_tokens < 1:
        return list(ids[-num_kept:])
    return [*ids[:start], *ids[max(start, stop - num_text_tokens) : stop], *ids[stop:]]


def trim_memory() -> None:
    """Return free memory of the C allocator to the system, if the C library has malloc_trim."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def max_chars_per_token(tokenizer: Any) -> int | None:
    """The largest number of characters that one token can stand for. None: no limit, as in all but byte-level BPE and
    BPE with byte fallback, and if a normalizer or pre-tokenizer drops or merges characters.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    backend = tokenizer.backend_tokenizer
    vocab = backend.get_vocab(with_added_tokens=True)
    steps = [*_steps(backend.normalizer), *_steps(backend.pre_tokenizer)]
    kinds = [step["type"] for step in steps]
    has_all_bytes = ("ByteLevel" in kinds and all(map(vocab.__contains__, ByteLevel.alphabet()))) or (
        getattr(backend.model, "byte_fallback", False) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
    )
    strips = any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values())
    if type(backend.model).__name__ != "BPE" or not has_all_bytes or strips or not all(map(_keeps_length, steps)):
        return None
    longest = max(map(len, vocab))
    return longest * COMPOSED_CHARS if {"NFC", "NFKC"} & set(kinds) else longest


def _keeps_length(step: dict[str, Any]) -> bool:
    if step["type"] == "Split":
        return step.get("behavior") != "Removed"
    if step["type"] == "Replace":
        return "String" in step["pattern"] and len(step["content"]) >= len(step["pattern"]["String"])
    return step["type"] in LENGTH_PRESERVING_STEPS


def _steps(component: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, as in tokenizer.json. Custom ones have the type ""."""
    if component is None:
        return
    try:
        state = json.loads(component.__getstate__())
    except Exception:  # tokenizers raises Exception for components written in Python
        state = {"type": ""}
    nested = state.get("normalizers") or state.get("pretokenizers") or []
    yield from nested if state["type"] == "Sequence" else [state]


def _pieces(text: str) -> Iterator[str]:
    """Consecutive pieces of at most PIECE_CHARS characters, cut before a space if there is one."""
    start = 0
    while start < len(text):
        end = start + PIECE_CHARS
        if end < len(text):
            space = text.rfind(" ", start + PIECE_CHARS // 2, end)
            end = space if space > 0 else end
        yield text[start:end]
        start = end
