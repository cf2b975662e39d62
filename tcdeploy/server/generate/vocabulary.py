"""The text and the bytes of single tokens, for log-probabilities. The two differ if a token is part of a character."""

from __future__ import annotations

import functools
import re
from typing import Any

BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")


class Vocabulary:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._is_byte_level = "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
        self._special = frozenset(tokenizer.all_special_ids)
        self.text = functools.lru_cache(maxsize=65536)(self._text)
        self.bytes = functools.lru_cache(maxsize=65536)(self._bytes)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a special token, such as BOS, which has no text of its own."""
        return token_id in self._special

    def _text(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def _bytes(self, token_id: int) -> bytes:
        """The token's bytes. A token that is part of a character has the text U+FFFD but exact bytes."""
        token = self._tokenizer.convert_ids_to_tokens(token_id) or ""
        fallback = BYTE_FALLBACK.fullmatch(token)
        if fallback:
            return bytes([int(fallback[1], 16)])
        table = _byte_decoder()
        if self._is_byte_level and token_id not in self._special and all(c in table for c in token):
            return bytes(table[character] for character in token)
        return self.text(token_id).encode()


@functools.cache
def _byte_decoder() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable bytes map to themselves, the others to code points from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
