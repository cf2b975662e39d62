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
ALL_BITS = -1  # of an int32 word


def spellings(word: str) -> list[str]:
    """The texts whose tokens are excluded."""
    text = word.lstrip()
    return list(dict.fromkeys([word, text, f" {text}"] if text else [word]))


class BadWords:
    """Implements the engine's `Constraint`. `words`: token ids of each excluded sequence, which must not be empty."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self.last_tokens: dict[tuple[int, ...], set[int]] = defaultdict(set)  # by the tokens before them
        for *others, last in words:
            self.last_tokens[tuple(others)].add(last)
        self.prefix_lengths = sorted({len(prefix) for prefix in self.last_tokens})

    def start(self) -> BadWordsMatcher:
        return BadWordsMatcher(self)


class BadWordsMatcher:
    """The output of one sequence, as far as it matters: its last tokens."""

    def __init__(self, bad_words: BadWords) -> None:
        self._bad_words = bad_words
        self._tail: tuple[int, ...] = ()

    @property
    def masker(self) -> BadWordsMasker:
        return MASKER

    def accept(self, token_id: int) -> MatchStatus:
        longest = self._bad_words.prefix_lengths[-1]
        self._tail = (*self._tail, token_id)[-longest:] if longest else ()
        return ""

    def excluded_tokens(self) -> set[int]:
        """The tokens that would complete a bad word."""
        excluded: set[int] = set()
        for length in self._bad_words.prefix_lengths:
            if length <= len(self._tail):
                prefix = self._tail[len(self._tail) - length :]
                excluded |= self._bad_words.last_tokens.get(prefix, set())
        return excluded


class BadWordsMasker:
    def fill(self, matcher_rows: Sequence[tuple[BadWordsMatcher, int]], masks: NDArray[numpy.int32]) -> None:
        """Set all bits of each row, except those of excluded tokens."""
        for matcher, row in matcher_rows:
            masks[row] = ALL_BITS
            for token_id in matcher.excluded_tokens():
                masks[row, token_id // 32] &= _all_bits_except(token_id % 32)


def _all_bits_except(bit: int) -> int:
    """As int32: the highest bit is the sign."""
    return 0x7FFFFFFF if bit == 31 else ~(1 << bit)


MASKER = BadWordsMasker()
