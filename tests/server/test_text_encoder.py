"""Texts are refused by their length where that is certain, counted in pieces where it is not, and else tokenized."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tcdeploy.models.load import resolve_model_path
from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.generate import text_encoder
from tcdeploy.server.generate.text_encoder import MAX_SHORT_COST, TextEncoder, max_chars_per_token
from tests.conftest import TINY

TEXTS = ["a" * 9000, "lorem ipsum " * 900, " " * 9000, "\u6f22\u5b57" * 3000, "\U0001f469\u200d" * 2000, "x\n\t" * 3000]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_model_path(TINY))


def byte_level(normalizer: Any = None, pre_tokenizer: Any = None) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate([*alphabet, "abcd"])}, []))
    backend.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def stripping() -> Any:
    result = byte_level()
    result.add_tokens([AddedToken("<mask>", lstrip=True)])
    return result


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: repr(text[:6]))
def test_token_ids_are_those_of_transformers(tokenizer: Any, text: str) -> None:
    encoder = TextEncoder(tokenizer)
    expected = tokenizer(text, verbose=False).input_ids
    assert asyncio.run(encoder.encode(text, len(expected), "prompt")) == expected
    assert len(text) <= len(expected) * encoder.max_chars_per_token, "no token stands for more characters"
    with pytest.raises(ApiError, match=f"; the limit is {len(expected) - 1}") as error:
        asyncio.run(encoder.encode(text, len(expected) - 1, "prompt"))
    assert (error.value.status, error.value.param, error.value.code) == (400, "prompt", "context_length_exceeded")


@pytest.mark.parametrize("adds_special_tokens", [True, False])
@pytest.mark.parametrize("num_kept", [1, 2, 3, 50, 10_000])
def test_the_last_tokens_are_those_that_transformers_keeps(
    tokenizer: Any, num_kept: int, adds_special_tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The special token that is added to the text is kept, but not one that the text contains."""
    text = tokenizer.bos_token + "lorem ipsum " * 60
    monkeypatch.setattr(tokenizer, "truncation_side", "left")
    options = {"add_special_tokens": adds_special_tokens, "truncation": True, "max_length": num_kept}
    expected = tokenizer(text, **options).input_ids
    whole = tokenizer(text, add_special_tokens=adds_special_tokens).input_ids
    assert whole[:2] == [1, 1] or not adds_special_tokens
    ids = asyncio.run(TextEncoder(tokenizer).encode(text, 1000, "prompt", adds_special_tokens, num_kept))
    if num_kept == 1:
        expected = whole[-1:]  # where transformers keeps the special token only
    assert ids == expected and len(ids) == min(num_kept, len(whole))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: byte_level(), 4),
        (lambda: byte_level(normalizers.NFC()), 16),
        (lambda: byte_level(normalizers.Sequence([normalizers.Replace(" ", "__"), normalizers.Prepend("_")])), 4),
        (lambda: byte_level(normalizers.Strip()), None),
        (lambda: byte_level(normalizers.Replace("aa", "a")), None),
        (lambda: byte_level(pre_tokenizer=pre_tokenizers.Whitespace()), None),
        (stripping, None),
        (lambda: PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))), None),
        (lambda: PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, []))), None),
    ],
    ids=["bytes", "NFC", "replace", "strip", "shorten", "whitespace", "added token", "words", "unknown characters"],
)  # fmt: skip
def test_the_length_of_tokens_is_bounded_unless_characters_may_vanish(make: Callable[[], Any], expected: Any) -> None:
    assert max_chars_per_token(make()) == expected


def test_a_text_that_must_be_too_long_is_not_tokenized(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = TextEncoder(tokenizer)
    monkeypatch.setattr(encoder, "_encode_fast", None)
    with pytest.raises(ApiError, match=r"has 8388608 characters, at least \d+ tokens; the limit is 1024"):
        asyncio.run(encoder.encode("a" * (8 << 20), 1024, "prompt"))


@pytest.mark.parametrize("has_spaces", [True, False])
def test_a_text_of_unknown_length_is_tokenized_up_to_twice_the_limit_only(
    tokenizer: Any, has_spaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, sizes = TextEncoder(tokenizer), []
    encoder.max_chars_per_token = None
    encode = encoder._encode_fast
    monkeypatch.setattr(
        encoder, "_encode_fast", lambda text, special: (sizes.append(len(text)), encode(text, special))[1]
    )
    text = ("lorem ipsum " if has_spaces else "loremipsum") * 300_000
    with pytest.raises(ApiError, match="has more than 1024 tokens"):
        asyncio.run(encoder.encode(text, 1024, "messages"))
    assert len(sizes) == 1 and sizes[0] <= text_encoder.PIECE_CHARS
    assert "".join(text_encoder._pieces(text)) == text


def test_long_texts_are_tokenized_in_two_threads(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, names = TextEncoder(tokenizer), set()
    encode = encoder._encode_fast

    def record(text: str, special: bool) -> Any:
        names.add(threading.current_thread().name)
        return encode(text, special)

    async def encode_all(text: str) -> None:
        await asyncio.gather(*(encoder.encode(text, 1 << 20, "prompt") for _ in range(20)))

    monkeypatch.setattr(encoder, "_encode_fast", record)
    asyncio.run(encode_all("a b " * (MAX_SHORT_COST // 2)))
    assert names <= {"tokenizer_0", "tokenizer_1"}
    names.clear()
    asyncio.run(encode_all("a"))
    assert names == {"MainThread"}
