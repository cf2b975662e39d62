"""Cuts the tokens of a text file into windows, from which perplexity is measured. Does not import torch.

The whole text is tokenized once, with the special tokens of the tokenizer (BOS) at its beginning only, and cut into
windows of equal length. The stride is the window: no token is in two windows, and the last window may be shorter. The
first token of a window has no context, and is not scored. This is the definition of most published perplexities on
WikiText, which therefore depend on the window: a longer one gives lower values.

Rejected: overlapping windows, which score each token with a longer context. They cost several passes over the text, and
the difference between two models, which this benchmark is for, hardly changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tcdeploy.bench.quality_settings import MIN_TOKENS
from tcdeploy.errors import UsageError

MAX_CHARS_PER_TOKEN = 16  # of a longer file only a beginning is read; English text has 4 to 5 characters per token


@dataclass(frozen=True)
class TokenWindows:
    """`is_whole`: whether these are all tokens of the file."""

    token_ids: list[int]
    window: int  # tokens
    is_whole: bool

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(0, len(self.token_ids), self.window):
            window = self.token_ids[start : start + self.window]
            if len(window) >= MIN_TOKENS:
                yield window

    def __len__(self) -> int:
        return len(self.token_ids) // self.window + (len(self.token_ids) % self.window >= MIN_TOKENS)

    @property
    def num_scored(self) -> int:
        return sum(len(window) - 1 for window in self)


@dataclass(frozen=True)
class Text:
    """The beginning of a text file, long enough for `max_tokens` tokens."""

    path: str
    content: str
    is_whole: bool
    max_tokens: int

    @property
    def sha256(self) -> str:
        """Of what was read, as UTF-8."""
        return hashlib.sha256(self.content.encode()).hexdigest()

    def encode(self, tokenizer: Any) -> tuple[list[int], bool]:
        """The first `max_tokens` token ids, and whether they are all of the file. Raises UsageError for too few."""
        token_ids = list(tokenizer(self.content).input_ids)
        if len(token_ids) < MIN_TOKENS:
            raise UsageError(
                f"{self.path} has too few tokens: {len(token_ids)}, of which the first is not scored",
                f"name a text of at least {MIN_TOKENS} tokens: --text FILE",
            )
        return token_ids[: self.max_tokens], self.is_whole and len(token_ids) <= self.max_tokens


def read_text(path: str, max_tokens: int) -> Text:
    """Raises UsageError for a file that cannot be read, is empty or is not UTF-8."""
    hint, limit = "name a UTF-8 text file: --text FILE", max_tokens * MAX_CHARS_PER_TOKEN
    try:
        with Path(path).open(encoding="utf-8") as file:
            content, rest = file.read(limit), file.read(1)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8: {error.reason}", hint) from error
    if not content:
        raise UsageError(f"{path} is empty", hint)
    return Text(path, content, not rest, max_tokens)
