"""vLLM's `bad_words`: a constraint that excludes sequences of tokens from the output.

A word is excluded as the tokenizer writes it, alone and after a space. Its last token is masked whenever the tokens
before it are the last ones of the output. As in vLLM, the same characters in other tokens are not excluded, nor is a
word that begins in the prompt. Does not import torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tcdeploy.engine.schedule.constraint import MatchStatus

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

MAX_BAD_WORDS = 128
MAX_WORD_TOKENS = 64
ALL_BITS = 2**32 - 1  # of a word


def spellings(word: str) -> list[str]:
    """The texts whose tokens are excluded."""
    text = word.lstrip()
    return list(dict.fromkeys([word, text, f" {text}"] if text else [word]))


class BadWords:
    """Implements the engine's `Constraint` and `Masker`. `words`: token ids of each excluded sequence, not empty."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self.last_tokens: dict[tuple[int, ...], set[int]] = defaultdict(set)  # by the tokens before them
        for *others, last in words:
            self.last_tokens[tuple(others)].add(last)
        self.prefix_lengths = sorted({len(prefix) for prefix in self.last_tokens})

    def start(self) -> BadWordsMatcher:
        return BadWordsMatcher(self)

    def fill(self, matcher_rows: Sequence[tuple[BadWordsMatcher, int]], masks: NDArray[numpy.int32]) -> None:
        """Set all bits of each row, except those of excluded tokens."""
        words = masks.view("uint32")  # the highest bit of an int32 is the sign
        for matcher, row in matcher_rows:
            words[row] = ALL_BITS
            for token_id in matcher.excluded_tokens():
                words[row, token_id // 32] &= ALL_BITS ^ (1 << token_id % 32)


class BadWordsMatcher:
    """The output of one sequence, as far as it matters: its last tokens."""

    def __init__(self, bad_words: BadWords) -> None:
        self.masker = bad_words
        self._tail: tuple[int, ...] = ()

    def accept(self, token_id: int) -> MatchStatus:
        longest = self.masker.prefix_lengths[-1]
        self._tail = (*self._tail, token_id)[-longest:] if longest else ()
        return ""

    def excluded_tokens(self) -> set[int]:
        """The tokens that would complete a bad word."""
        excluded: set[int] = set()
        for length in self.masker.prefix_lengths:
            if length <= len(self._tail):
                prefix = self._tail[len(self._tail) - length :]
                excluded |= self.masker.last_tokens.get(prefix, set())
        return excluded
