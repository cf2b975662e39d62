"""Streamed text equals the decoded text, also for invalid UTF-8, and takes linear time."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models

from tcdeploy.text.detokenizer import IncrementalDetokenizer

SPECIAL, SPACED_A, B, SPACE = 256, 257, 258, 259


@pytest.fixture(scope="module")
def byte_fallback() -> Any:
    """A tokenizer with a token for each byte, as those of Llama 2, Mistral and Gemma."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"<s>": SPECIAL, "▁a": SPACED_A, "b": B, "▁": SPACE}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(["<s>"])
    return SimpleNamespace(is_fast=True, backend_tokenizer=backend, decode=backend.decode)


def stream(tokenizer: Any, ids: list[int], skips: bool = True) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, skips)
    return "".join(map(detokenizer.push, ids)) + detokenizer.finish()


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([B, *[0x80] * 100, B], "b" + "\ufffd" * 100 + "b"),
        ([*[0xE2] * 40, SPACED_A], "\ufffd" * 40 + " a"),
        ([SPACED_A, *[SPECIAL] * 100, SPACED_A], "a a"),
        ([SPACED_A, *"é日👩".encode(), SPECIAL, B], "a" + "é日👩" + "b"),
        ([B, *"👩".encode()[:3]], "b" + "\ufffd" * 3),
        ([SPACE, *[SPECIAL] * 20, SPACE], " "),
        ([*[SPECIAL] * 60, SPACE, *[SPECIAL] * 60, SPACED_A], " a"),
    ],
    ids=["invalid", "cut", "special", "valid", "cut at the end", "spaces", "space after special"],
)
def test_streamed_text_is_the_decoded_text(byte_fallback: Any, ids: list[int], text: str) -> None:
    assert stream(byte_fallback, ids) == text == byte_fallback.backend_tokenizer.decode(ids)


def test_an_invalid_byte_after_a_character_does_not_raise(byte_fallback: Any) -> None:
    """The decoder replaces a whole run of bytes if one of them is invalid, also bytes that were returned as text."""
    assert stream(byte_fallback, [*"日".encode(), 0xC0, SPACED_A]).startswith("日\ufffd")
    assert stream(byte_fallback, [*"日".encode(), 0xC0, SPACED_A]).endswith("a")


@pytest.mark.parametrize("token_id", [0x80, SPECIAL])
def test_the_time_is_linear_in_the_number_of_withheld_tokens(byte_fallback: Any, token_id: int) -> None:
    def cpu_seconds(num_tokens: int) -> float:
        start = time.thread_time()
        stream(byte_fallback, [token_id] * num_tokens)
        return time.thread_time() - start

    assert min(cpu_seconds(4000) for _ in range(3)) < 9 * min(cpu_seconds(1000) for _ in range(3))  # not 16 times
