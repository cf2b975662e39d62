"""The text of one answer while its tokens arrive: whole characters, and nothing past a stop string.

What may be the beginning of a stop string is held back until it is one or is none, so the pieces put together are the
text that is given at once. Of several stop strings the one that is complete first counts, however the text was cut.
"""

from __future__ import annotations

from typing import Any

from tcdeploy.engine.detokenizer import IncrementalDetokenizer


class StopStringDetokenizer:
    """`push` gives the text that a token adds; once `stopped`, the answer ends before its stop string."""

    def __init__(self, tokenizer: Any, stop_strings: tuple[str, ...], skip_special_tokens: bool = True) -> None:
        self._stream = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._stop_strings = stop_strings
        self._held_back = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        return self._text_before_stop(self._stream.push(token_id))

    def finish(self) -> str:
        """What was held back, at the end of the tokens."""
        if self.stopped:
            return ""
        last = self._text_before_stop(self._stream.finish())
        held, self._held_back = self._held_back, ""
        return last if self.stopped else last + held

    def _text_before_stop(self, piece: str) -> str:
        if self.stopped:
            return ""
        if not self._stop_strings:
            return piece
        text = self._held_back + piece
        found = [(start + len(stop), start) for stop in self._stop_strings if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held_back = True, ""
            return text[: min(found)[1]]
        keep = max(_partial_stop_length(text, stop) for stop in self._stop_strings)
        self._held_back = text[len(text) - keep :]
        return text[: len(text) - keep]


def _partial_stop_length(text: str, stop: str) -> int:
    """How many characters at the end of `text` begin `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
