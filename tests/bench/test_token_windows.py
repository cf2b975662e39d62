"""Texts are cut into windows of equal length, and files that cannot be measured are refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.bench.quality_settings import QualitySettings, TextSettings
from tcdeploy.bench.token_windows import MAX_CHARS_PER_TOKEN, Text, TokenWindows, read_text
from tcdeploy.errors import UsageError


def words(content: str) -> Any:
    """A tokenizer: the length of each word."""
    return SimpleNamespace(input_ids=[len(word) for word in content.split()])


@pytest.mark.parametrize(
    ("count", "expected", "scored"),
    [
        (6, [[0, 1, 2], [3, 4, 5]], 4),
        (8, [[0, 1, 2], [3, 4, 5], [6, 7]], 5),
        (7, [[0, 1, 2], [3, 4, 5]], 4),  # a last window of one token has nothing to score
        (2, [[0, 1]], 1),
    ],
)
def test_windows_do_not_overlap_and_have_two_tokens_or_more(count: int, expected: list[list[int]], scored: int) -> None:
    windows = TokenWindows(list(range(count)), 3, True)
    assert list(windows) == expected
    assert (len(windows), windows.num_scored) == (len(expected), scored)


def test_at_most_the_requested_tokens_are_used(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("one three two")
    assert read_text(str(path), 3).encode(words) == ([3, 5, 3], True)
    assert read_text(str(path), 2).encode(words) == ([3, 5], False)


def test_of_a_long_file_only_a_beginning_is_read(tmp_path: Path) -> None:
    path, limit = tmp_path / "text", 2 * MAX_CHARS_PER_TOKEN
    path.write_text("é" * limit)
    assert read_text(str(path), 2) == Text(str(path), "é" * limit, True, 2)
    path.write_text("é" * limit + "x")
    text = read_text(str(path), 2)
    assert (text.content, text.is_whole) == ("é" * limit, False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "is empty"),
        (b"caf\xe9", "is not UTF-8: unexpected end of data"),
        (b"one", "has too few tokens: 1, of which the first is not scored"),
        (b" ", "has too few tokens: 0, of which the first is not scored"),
    ],
)
def test_a_text_without_a_scored_token_is_refused(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError) as raised:
        read_text(str(path), 100).encode(words)
    assert raised.value.message == f"{path} {message}"
    assert "--text FILE" in raised.value.hint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "--text is missing"),
        ({"text": "a", "tokens": 1}, "--tokens is 1; it must be 2 or more"),
        ({"text": "a", "window": 1}, "--window is 1; it must be 2 or more"),
        ({"against": "model"}, "--against needs --text"),
        (
            {"text": "a", "output": "/no/such/folder/x.json"},
            "/no/such/folder/x.json is in a folder that does not exist",
        ),
    ],
)
def test_settings_that_measure_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        QualitySettings(**settings)
    assert raised.value.hint


def test_compile_needs_no_text() -> None:
    assert TextSettings().text is None
    assert TextSettings(text="a").window_within(4096, 1000) == 1000
    assert TextSettings(text="a", window=7).window_within(4096, 1000) == 7
