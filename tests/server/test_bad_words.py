"""Bad words never occur in the output, and nothing else is excluded."""

from __future__ import annotations

from typing import Any

import httpx
import numpy
import pytest

from tcdeploy.server.output.structured.bad_words import BadWords, spellings
from tests.server.conftest import ServerProcess

VOCAB_SIZE = 96


def allowed_after(constraint: BadWords, *tokens: int) -> set[int]:
    matcher = constraint.start()
    for token_id in tokens:
        assert matcher.accept(token_id) == ""
    masks = numpy.zeros((2, VOCAB_SIZE // 32), dtype=numpy.int32)
    constraint.fill([(matcher, 1)], masks)
    assert not masks[0].any(), "only the matcher's row is written"
    return {token_id for token_id in range(VOCAB_SIZE) if masks[1, token_id // 32] >> (token_id % 32) & 1}


@pytest.mark.parametrize(
    ("tokens", "excluded"),
    [
        ((), {31, 64}), ((5,), {31, 64}), ((5, 6), {31, 64, 63, 95, 8}), ((9, 5, 6), {31, 64, 63, 95, 8}),
        ((6,), {31, 64, 8}), ((5, 6, 6), {31, 64, 8}), ((5, 6, 7), {31, 64}),
    ],
)  # fmt: skip
def test_a_token_is_excluded_if_it_completes_a_bad_word(tokens: tuple[int, ...], excluded: set[int]) -> None:
    words = [(31,), (64,), (5, 6, 63), (5, 6, 95), (6, 8)]
    assert set(range(VOCAB_SIZE)) - allowed_after(BadWords(words), *tokens) == excluded


def test_a_word_is_excluded_with_and_without_the_space_before_it() -> None:
    assert spellings("foo") == ["foo", " foo"]
    assert spellings("  foo") == ["  foo", "foo", " foo"]
    assert spellings("\n") == ["\n"]


def post(server: ServerProcess, **fields: Any) -> httpx.Response:
    body = {"prompt": "This module provides", "max_tokens": 30, "temperature": 0, **fields}
    return httpx.post(f"{server.address}/v1/completions", json=body, timeout=60)


def test_the_text_avoids_bad_words(server: ServerProcess) -> None:
    plain = post(server).json()["choices"][0]["text"]
    words = plain.split()
    banned = [words[1], f"{words[2]} {words[3]}"]
    response = post(server, bad_words=banned, n=2)
    assert response.status_code == 200, response.text
    texts = [choice["text"] for choice in response.json()["choices"]]
    assert len(set(texts)) == 1 and texts[0] != plain
    assert all(word in plain and word not in texts[0] for word in banned)
    assert texts[0].startswith(plain[: plain.index(words[1])].rstrip())
    assert post(server, bad_words=["\u6f22\u5b57\u6f22\u5b57"]).json()["choices"][0]["text"] == plain
    assert post(server, bad_words=[]).json()["choices"][0]["text"] == plain


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": [""]}, {"bad_words": ["a"] * 129}, {"bad_words": ["one two three " * 40]}, {"bad_words": "a"},
        {"bad_words": ["a"], "response_format": {"type": "json_object"}},
    ],
    ids=lambda fields: str(fields)[:40],
)  # fmt: skip
def test_invalid_bad_words_are_refused(server: ServerProcess, fields: dict[str, Any]) -> None:
    response = post(server, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "bad_words"), response.text
