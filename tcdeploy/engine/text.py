"""Token ids to text while they arrive, by tokenizers' DecodeStream: a piece is held back until it is whole UTF-8."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of one sequence, piece by piece; special tokens give none."""

    def __init__(self, tokenizer: Any) -> None:
        self._backend = tokenizer._tokenizer  # the Rust tokenizer that DecodeStream wants
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes; "" while a character is still open."""
        return self._stream.step(self._backend, token_id) or ""


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
