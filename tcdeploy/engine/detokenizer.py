"""Token ids to text while they arrive, by tokenizers' DecodeStream: a piece is held back until it is whole UTF-8."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream

from tcdeploy.errors import ModelError


class IncrementalDetokenizer:
    """The text of one sequence, piece by piece. Needs a tokenizer of tokenizers' making."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(f"{type(tokenizer).__name__} cannot stream text", "use a model with a fast tokenizer")
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._ids: list[int] = []
        self._sent = 0  # characters

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; "" while a character is still open."""
        self._ids.append(token_id)
        piece = self._stream.step(self._tokenizer.backend_tokenizer, token_id) or ""
        self._sent += len(piece)
        return piece

    def finish(self) -> str:
        """What was held back: the replacement character of one that the last token left open."""
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)[self._sent :]


def stop_token_ids(generation_config: Any) -> tuple[int, ...]:
    """The model's end-of-sequence ids, as its generation config names them: none, one or several."""
    ids = getattr(generation_config, "eos_token_id", None)
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (int(ids),)


def chat_prompt(tokenizer: Any, message: str) -> list[int]:
    """Token ids of one user message in the model's chat template."""
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return list(encoded["input_ids"])
