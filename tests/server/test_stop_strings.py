"""Text in pieces is the text at once: whole characters, and not a character of a stop string."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from tcdeploy.server.stop_strings import StopStringDetokenizer

TEXTS = (
    "plain words, and some more", "日本語のテキストと中文", "naïve café Ångström", "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag",
    "ก็ไม่เป็นไร", "e\u0301e\u0302 combining \u0b95\u0bcd\u0bb7", "mixed 漢字🙂 and \u200b\u200d joiners",
    "tab\t\nnew\r\nlines  ",
)  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """The embedded model's: bytes that no merge covers are tokens of their own, so characters are cut all the time."""
    from transformers import AutoTokenizer

    from tcdeploy.models.load import resolve_model_path

    return AutoTokenizer.from_pretrained(resolve_model_path("builtin:tiny"))


def pieces(tokenizer: PreTrainedTokenizerBase, ids: list[int], stop_strings: tuple[str, ...] = ()) -> list[str]:
    text = StopStringDetokenizer(tokenizer, stop_strings)
    found = []
    for token_id in ids:
        found.append(text.push(token_id))
        if text.stopped:
            return found
    return [*found, text.finish()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_and_make_the_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False).input_ids
    found = pieces(tokenizer, ids)
    assert "".join(found) == tokenizer.decode(ids) == text
    assert not any("\ufffd" in piece for piece in found)


def test_a_character_that_the_answer_left_open_is_told_at_the_end(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("a🙂", add_special_tokens=False).input_ids[:-1]
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), text=st.sampled_from(TEXTS))
def test_whatever_the_stop_string_the_text_ends_before_it(
    tokenizer: PreTrainedTokenizerBase, data: st.DataObject, text: str
) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 6))]
    stop_strings = (stop, data.draw(st.text(min_size=1, max_size=3)))
    ids = tokenizer(text, add_special_tokens=False).input_ids
    ends = [(found + len(one), found) for one in stop_strings if (found := text.find(one)) >= 0]
    assert "".join(pieces(tokenizer, ids, stop_strings)) == text[: min(ends)[1]], "the one that is complete first"


def test_random_tokens_in_pieces_are_random_tokens_at_once(tokenizer: PreTrainedTokenizerBase) -> None:
    source = random.Random(4)
    for _ in range(50):
        ids = [source.randrange(tokenizer.vocab_size) for _ in range(40)]
        assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)
