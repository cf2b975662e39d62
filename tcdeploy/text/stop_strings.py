"""Incremental detokenization with stop strings: emits whole characters, and no text of a stop string.

Text that may be the start of a stop string is held back until it matches or cannot match. Of several stop strings, the
one that is complete first ends the text, however the tokens cut it.
"""

from __future__ import annotations

from typing import Any

from tcdeploy.text.detokenizer import IncrementalDetokenizer


class StopStringDetokenizer:
    """The text of one sequence. After a stop string, `stopped` is True, and `matched` is the stop string."""

    def __init__(
        self, tokenizer: Any, stop_strings: tuple[str, ...], skip_special_tokens: bool = True,
        hidden_ids: frozenset[int] = frozenset(),
    ) -> None:  # fmt: skip
        """`hidden_ids`: tokens to omit from the text even without `skip_special_tokens`."""
        self._hidden_ids = hidden_ids
        self._stream = IncrementalDetokenizer(tokenizer, skip_special_tokens)
        self._stop_strings = stop_strings
        self._held_back = ""
        self.stopped = False
        self.matched: str | None = None

    def receive(self, token_id: int, finish_reason: str) -> tuple[str, str]:
        """The text that a token of the engine adds, and why the text ends: "" while it does not.

        `finish_reason`: the engine's, which ignores stop strings. A match makes it "stop".
        """
        text = self.push(token_id)
        if finish_reason and not self.stopped:
            text += self.finish()
        return text, "stop" if self.stopped else finish_reason

    def push(self, token_id: int) -> str:
        if token_id in self._hidden_ids:
            return ""
        return self._text_before_stop(self._stream.push(token_id))

    def finish(self) -> str:
        """The text that was held back, after the last token."""
        if self.stopped:
            return ""
        tail = self._text_before_stop(self._stream.finish())
        held_back, self._held_back = self._held_back, ""
        return tail if self.stopped else tail + held_back

    def _text_before_stop(self, piece: str) -> str:
        if self.stopped:
            return ""
        if not self._stop_strings:
            return piece
        text = self._held_back + piece
        matches = [(start + len(stop), start) for stop in self._stop_strings if (start := text.find(stop)) >= 0]
        if matches:
            self.stopped, self._held_back = True, ""
            end, start = min(matches)
            self.matched = text[start:end]
            return text[:start]
        num_held_back = max(partial_match_length(text, stop) for stop in self._stop_strings)
        self._held_back = text[len(text) - num_held_back :]
        return text[: len(text) - num_held_back]


def partial_match_length(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
