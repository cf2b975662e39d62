"""Streamed pieces concatenate to the whole text, contain whole characters only, and end before a stop string."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from tcdeploy.text.stop_strings import StopStringDetokenizer

TEXTS = (
    "plain words, and some more", "日本語のテキストと中文", "naïve café Ångström", "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag",
    "ก็ไม่เป็นไร", "e\u0301e\u0302 combining \u0b95\u0bcd\u0bb7", "mixed 漢字🙂 and \u200b\u200d joiners",
    "tab\t\nnew\r\nlines  ",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """The embedded model's tokenizer. Its byte tokens split most non-ASCII characters."""
    from transformers import AutoTokenizer

    from tcdeploy.models.load import resolve_model_path

    return AutoTokenizer.from_pretrained(resolve_model_path("builtin:tiny"))


def pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int], stop_strings: tuple[str, ...] = ()) -> list[str]:
    detokenizer = StopStringDetokenizer(tokenizer, stop_strings)
    texts = []
    for token_id in ids:
        texts.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            return texts
    return [*texts, detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_concatenate_to_the_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    texts = pieces(tokenizer, ids)
    assert "".join(texts) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in texts)


def test_an_incomplete_last_character_is_emitted_at_the_end(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("a🙂", add_special_tokens=False).input_ids[:-1]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=300)
@given(data=st.data(), text=st.sampled_from(TEXTS))
def test_the_text_ends_before_any_stop_string(
    tokenizer: PreTrainedTokenizerBase, data: st.DataObject, text: str
) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 6))]
    stop_strings = (stop, data.draw(st.text(min_size=1, max_size=3)))
    ids = tokenizer(text, add_special_tokens=False).input_ids
    matches = [(start + len(stop), start) for stop in stop_strings if (start := text.find(stop)) >= 0]
    assert "".join(pieces(tokenizer, ids, stop_strings)) == text[: min(matches)[1]], "the first complete one counts"


def test_random_tokens_decode_in_pieces_as_at_once(tokenizer: PreTrainedTokenizerBase) -> None:
    source = random.Random(4)
    for _ in range(50):
        ids = [source.randrange(tokenizer.vocab_size) for _ in range(40)]
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


def test_the_matched_stop_string_is_known_even_if_it_ends_inside_a_token(tokenizer: PreTrainedTokenizerBase) -> None:
    detokenizer = StopStringDetokenizer(tokenizer, ("never", " li"))
    ids = tokenizer("A list of", add_special_tokens=False).input_ids
    assert " list" in [tokenizer.decode([token_id]) for token_id in ids]
    assert "".join(map(detokenizer.push, ids)) == "A" and detokenizer.matched == " li"
    assert StopStringDetokenizer(tokenizer, ("never",)).matched is None
