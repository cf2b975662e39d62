"""A line on stderr that counts the answers of a long batch, if stderr is a terminal. Imports neither torch nor rich."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

SHOW_AFTER_S = 2.0
INTERVAL_S = 0.2
BAR_WIDTH = 24


class ProgressBar:
    """Draws nothing during the first SHOW_AFTER_S, and nothing if `is_on` is false or `stream` is no terminal."""

    def __init__(self, num_answers: int, is_on: bool = True, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_on = is_on and self._stream is not None and self._stream.isatty()
        self._num_answers, self._num_complete, self._num_tokens = num_answers, 0, 0
        self._started = time.monotonic()
        self._next_draw = self._started + SHOW_AFTER_S
        self._is_drawn = False

    def add(self, num_tokens: int, is_complete: bool) -> None:
        """Count the new tokens of one answer, and the answer if it is complete."""
        self._num_tokens += num_tokens
        self._num_complete += is_complete
        if self._is_on and (now := time.monotonic()) >= self._next_draw:
            self._next_draw = now + INTERVAL_S
            self._draw(now - self._started)

    def close(self) -> None:
        """Draw the final counts, and end the line."""
        if self._is_drawn:
            self._draw(time.monotonic() - self._started)
            print(file=self._stream, flush=True)

    def _draw(self, seconds: float) -> None:
        self._is_drawn = True
        filled = BAR_WIDTH * self._num_complete // self._num_answers
        bar = f"{'#' * filled}{'.' * (BAR_WIDTH - filled)}"
        counts = f"{self._num_complete}/{self._num_answers} answers, {self._num_tokens} tokens"
        line = f"[{bar}] {counts}, {self._num_tokens / seconds:.0f} tokens/s, {seconds:.0f} s"
        columns = shutil.get_terminal_size().columns - 1  # a line of the full width would wrap
        print(f"\r{line[:columns]:<{columns}}", end="", file=self._stream, flush=True)
