"""Incremental detokenization with tokenizers' DecodeStream, which withholds text until its UTF-8 is complete.

DecodeStream decodes all withheld tokens again with each token, which is quadratic for long runs of invalid UTF-8 or of
skipped special tokens (17 s for 10,000 bytes). A stream that withholds MAX_WITHHELD tokens is therefore replaced.
"""

from __future__ import annotations

import functools
from typing import Any

from tokenizers.decoders import DecodeStream

MAX_WITHHELD = 16  # tokens; a character has at most four bytes
MAX_CUT_BYTES = 3  # of a character that is not complete


class IncrementalDetokenizer:
    """Detokenizes one sequence as tokens arrive. The tokenizer must be a fast one."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._context: list[int] = []  # the tokens of the last text; decoders treat the start of a text differently
        self._withheld: list[int] = []  # the tokens since then

    def push(self, token_id: int) -> str:
        """The text completed by `token_id`; "" while a character is incomplete."""
        self._withheld.append(token_id)
        try:
            piece = self._stream.step(self._tokenizer.backend_tokenizer, token_id)
        except Exception:  # with byte fallback, an invalid byte changes text that was already returned
            piece = self._text_of(self._withheld)
            self._stream = DecodeStream(ids=self._withheld, skip_special_tokens=self._skip)
        if piece is not None:
            self._context, self._withheld = self._withheld, []
            return str(piece)
        return self._release() if len(self._withheld) == MAX_WITHHELD else ""

    def finish(self) -> str:
        """The withheld rest: a replacement character if the last token left a character incomplete."""
        return self._text_of(self._withheld)

    def _text_of(self, ids: list[int]) -> str:
        """The text of withheld tokens."""
        if not ids:
            return ""
        before, text = self._decode(self._context), self._decode([*self._context, *ids])
        return text[len(before) :] if text.startswith(before) else self._decode(ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=self._skip))

    def _release(self) -> str:
        """The text of the withheld tokens, except the last ones, which may begin a character. They stay withheld."""
        released, kept = self._withheld[:-MAX_CUT_BYTES], self._withheld[-MAX_CUT_BYTES:]
        text = self._text_of(released)
        if not text:  # a space that is stripped at the start of a text still precedes the next tokens
            shown = [token_id for token_id in released if token_id not in self._skipped_ids]
            self._context = [*self._context, *shown][:MAX_WITHHELD]
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=self._skip)
        self._withheld = []
        return text + "".join(map(self.push, kept))

    @functools.cached_property
    def _skipped_ids(self) -> frozenset[int]:
        added = self._tokenizer.backend_tokenizer.get_added_tokens_decoder().items() if self._skip else ()
        return frozenset(token_id for token_id, token in added if token.special)
