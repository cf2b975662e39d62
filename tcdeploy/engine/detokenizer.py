"""Incremental detokenization with tokenizers' DecodeStream, which withholds text until its UTF-8 is complete."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream

from tcdeploy.errors import ModelError
from tcdeploy.models.conversation import render_conversation


class IncrementalDetokenizer:
    """Detokenizes one sequence as tokens arrive. Raises ModelError for a slow (pure Python) tokenizer."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                f"{type(tokenizer).__name__} is a slow tokenizer, which cannot stream text",
                "use a model with a fast tokenizer",
            )
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._sent = 0  # characters returned so far

    def push(self, token_id: int) -> str:
        """The text completed by `token_id`; "" while a character is incomplete."""
        self._ids.append(token_id)
        piece = self._stream.step(self._tokenizer.backend_tokenizer, token_id) or ""
        self._sent += len(piece)
        return piece

    def finish(self) -> str:
        """The withheld rest: a replacement character if the last token left a character incomplete."""
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)[self._sent :]


def chat_prompt(tokenizer: Any, message: str) -> list[int]:
    """Token ids of one user message, rendered by the model's chat template with a generation prompt.

    Raises ModelError if the template fails.
    """
    text = render_conversation(tokenizer, [{"role": "user", "content": message}], {"add_generation_prompt": True})
    return list(tokenizer(text, add_special_tokens=False).input_ids)
