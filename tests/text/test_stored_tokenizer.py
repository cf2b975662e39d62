"""Stored tokenizers give the results of transformers' tokenizers, and those that would not are not stored."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, CodeLlamaTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from tcdeploy.errors import ModelError
from tcdeploy.models.location import BUILTIN_MODELS
from tcdeploy.server.apis.openai.validation import ModelLimits
from tcdeploy.server.generate.choice import Vocabulary
from tcdeploy.server.generate.text_encoder import TextEncoder, max_chars_per_token
from tcdeploy.server.generate.tokenization import PromptTokenizer
from tcdeploy.server.output.structured.structured_output import StructuredOutputBackend, make_ll_tokenizer
from tcdeploy.server.output.tools import ToolSupport
from tcdeploy.text.chat_template import ChatTemplate, render_messages
from tcdeploy.text.conversation import replace_chat_template
from tcdeploy.text.detokenizer import IncrementalDetokenizer
from tcdeploy.text.stored_tokenizer import StoredTokenizer, load_stored_tokenizer
from tcdeploy.text.tokenizer import describe_tokenizer, overridden_methods
from tests.conftest import TINY

TEXTS = [
    "", " ", "This module provides a list.", "Grüße \N{SNOWMAN} \U0001f600\n\tend", "a , b . c ? it 's n't 've ' x '",
    "<|user|>Hi<|end|><|assistant|> <unk>[SEP]",
]  # fmt: skip
MESSAGES = [{"role": "user", "content": "Hello \N{SNOWMAN}"}]


def word_pieces(folder: Path) -> None:
    """Like BERT: WordPiece, a post-processor that adds special tokens, and text that is cleaned of spaces."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz.,?'", *(f"##{c}" for c in "abcdesthx")]
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=True, eos_token="[SEP]", **names
    ).save_pretrained(folder)


def byte_fallback(folder: Path) -> None:
    """Like Llama 2: BPE with a token for each byte, and a decoder that strips the first space."""
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"\u2581abcdefghijklmnopqrstuvwxyz{}",
    ]
    merges = [("\u2581", "a"), ("\u2581", "b"), ("a", "b"), ("\u2581a", "b")]
    vocabulary = {token: number for number, token in enumerate([*tokens, *map("".join, merges)])}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def with_other_files(folder: Path) -> None:
    """The embedded model with more tokens in tokenizer_config.json, and a tokenizer.json that truncates and pads."""
    shutil.copytree(BUILTIN_MODELS[TINY], folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["extra_special_tokens"] = ["<call>", "[SEP]"]
    config["pad_token"] = "<pad>"
    config["clean_up_tokenization_spaces"] = True  # transformers ignores it for BPE
    config["chat_template"] = None
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)


def embedded(folder: Path) -> None:
    shutil.copytree(BUILTIN_MODELS[TINY], folder)


@pytest.fixture(
    scope="module", params=[embedded, with_other_files, word_pieces, byte_fallback], ids=lambda make: make.__name__
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, StoredTokenizer]:
    """transformers' tokenizer, and the one that was stored and loaded."""
    make: Callable[[Path], None] = request.param
    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    make(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return tokenizer, store_and_load(tokenizer, folder)


def store_and_load(tokenizer: Any, folder: Path) -> StoredTokenizer:
    record, backend_json, problem = describe_tokenizer(tokenizer, "llama", folder)
    assert record is not None and not problem
    record = dataclasses.replace(record, special_ids=tuple(json.loads(json.dumps(record.special_ids))))
    if backend_json:
        (folder / "stored.json").write_text(backend_json)
        record = dataclasses.replace(record, backend="stored.json")
    return load_stored_tokenizer(record, folder, folder)


def sequences(tokenizer: Any) -> list[list[int]]:
    source, size = random.Random(3), tokenizer.backend_tokenizer.get_vocab_size()
    return [[source.randrange(size) for _ in range(source.randrange(1, 40))] for _ in range(200)]


def test_texts_have_the_token_ids_of_transformers(pair: tuple[Any, StoredTokenizer]) -> None:
    theirs, stored = pair
    for text in TEXTS:
        for adds in (True, False):
            expected = theirs(text, add_special_tokens=adds).input_ids
            assert stored(text, add_special_tokens=adds).input_ids == expected, text
        assert stored(text).input_ids == theirs(text).input_ids
    assert any(stored(text).input_ids for text in TEXTS)


def test_token_ids_have_the_text_of_transformers(pair: tuple[Any, StoredTokenizer]) -> None:
    theirs, stored = pair
    for ids in [*(theirs(text).input_ids for text in TEXTS), *sequences(theirs)]:
        for skip in (True, False):
            assert stored.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
        assert stored.decode(ids) == theirs.decode(ids)


def test_streamed_text_is_equal(pair: tuple[Any, StoredTokenizer]) -> None:
    def stream(tokenizer: Any, ids: list[int]) -> list[str]:
        detokenizer = IncrementalDetokenizer(tokenizer)
        try:
            return [*map(detokenizer.push, ids), detokenizer.finish()]
        except Exception as error:  # of tokenizers, for some bytes that are not UTF-8
            return [str(error)]

    theirs, stored = pair
    for ids in sequences(theirs)[:50]:
        assert stream(stored, ids) == stream(theirs, ids)


def test_attributes_are_those_of_transformers(pair: tuple[Any, StoredTokenizer]) -> None:
    theirs, stored = pair
    for name in (
        "all_special_ids", "bos_token", "chat_template", "eos_token", "eos_token_id", "pad_token",
        "special_tokens_map", "unk_token",
    ):  # fmt: skip
        assert getattr(stored, name) == getattr(theirs, name), name
    for token_id in [*range(theirs.backend_tokenizer.get_vocab_size()), 10**6]:
        assert stored.convert_ids_to_tokens(token_id) == theirs.convert_ids_to_tokens(token_id)
    described = [{i: repr(t) for i, t in item.added_tokens_decoder.items()} for item in pair]
    assert described[0] == described[1]


def test_what_the_server_derives_is_equal(pair: tuple[Any, StoredTokenizer]) -> None:
    derived = []
    for tokenizer in pair:
        vocabulary, encoder = Vocabulary(tokenizer), TextEncoder(tokenizer)
        limits = ModelLimits(context=64, vocab_size=4096)
        prompts = PromptTokenizer(tokenizer, encoder, limits, "m", ToolSupport(tokenizer, "llama"))
        ids = range(tokenizer.backend_tokenizer.get_vocab_size())
        texts = [(vocabulary.text(i), vocabulary.bytes(i), vocabulary.is_special(i)) for i in ids]
        derived.append((texts, max_chars_per_token(tokenizer), prompts.info(), prompts.tools.unsupported_reason))
    assert derived[0] == derived[1]


@pytest.mark.parametrize("stop_ids", [(), (2,), (2, 5)])
def test_masks_of_grammars_are_those_of_llguidance(
    pair: tuple[Any, StoredTokenizer], stop_ids: tuple[int, ...]
) -> None:
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    theirs, stored = pair
    try:
        expected_tokenizer = from_tokenizer(theirs, eos_token=list(stop_ids) or None)
    except ValueError as error:  # llguidance does not support WordPiece
        with pytest.raises(ValueError, match=re.escape(str(error))):
            make_ll_tokenizer(stored, stop_ids)
        return
    tokenizer = make_ll_tokenizer(stored, stop_ids)
    assert tokenizer.vocab_size == expected_tokenizer.vocab_size
    grammar = LLMatcher.grammar_from_regex(r"[a-e ]{1,3}( x)?")
    matchers = [LLMatcher(item, grammar) for item in (tokenizer, expected_tokenizer)]
    source = random.Random(1)
    for _ in range(4):
        masks = [numpy.frombuffer(matcher.compute_bitmask(), numpy.uint8) for matcher in matchers]
        assert masks[0].any() and (masks[0] == masks[1]).all()
        allowed = numpy.flatnonzero(numpy.unpackbits(masks[0], bitorder="little"))
        token_id = int(source.choice(list(allowed)))
        assert [matcher.consume_token(token_id) for matcher in matchers] in ([True, True], [1, 1])
        if matchers[0].is_stopped():
            assert matchers[1].is_stopped()
            break
    asyncio.run(StructuredOutputBackend(stored, stop_ids).check_available("response_format"))


def test_a_backend_that_equals_the_models_file_is_not_stored_again(tmp_path: Path) -> None:
    folder = BUILTIN_MODELS[TINY]
    assert describe_tokenizer(AutoTokenizer.from_pretrained(folder), "llama", folder).backend_json == ""
    with_other_files(tmp_path / "model")
    other = describe_tokenizer(AutoTokenizer.from_pretrained(tmp_path / "model"), "llama", tmp_path / "model")
    assert "[SEP]" in other.backend_json and json.loads(other.backend_json)["truncation"] is None


@pytest.mark.parametrize("template", ["{{ messages[0].content }}{{ bos_token }}", {"default": "a", "tool_use": "b"}])
@pytest.mark.parametrize("tools", [None, [{"type": "function"}]])
def test_chat_templates_are_selected_and_rendered_as_by_transformers(template: Any, tools: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODELS[TINY])
    tokenizer.chat_template = template
    stored = store_and_load(tokenizer, BUILTIN_MODELS[TINY])
    expected = tokenizer.apply_chat_template(MESSAGES, tools=tools, tokenize=False)
    assert render_messages(stored, MESSAGES, {"tools": tools}) == expected


def test_a_chat_template_of_the_user_replaces_all_stored_ones() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODELS[TINY])
    tokenizer.chat_template = {"default": "a", "tool_use": "b"}
    stored = store_and_load(tokenizer, BUILTIN_MODELS[TINY])
    replace_chat_template(stored, ChatTemplate(Path("own.jinja"), "{{ messages[0].content }}{{ eos_token }}"))
    expected = MESSAGES[0]["content"] + tokenizer.eos_token
    for variables in ({}, {"tools": [{"type": "function"}]}):
        assert render_messages(stored, MESSAGES, variables) == expected


@pytest.mark.parametrize("template", [None, {"other": "a"}])
def test_a_missing_chat_template_is_an_error_as_in_transformers(template: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODELS[TINY])
    tokenizer.chat_template = template
    for item in (tokenizer, store_and_load(tokenizer, BUILTIN_MODELS[TINY])):
        with pytest.raises(ModelError, match="the chat template cannot be used"):
            render_messages(item, MESSAGES, {})


def test_a_response_template_of_a_family_is_stored() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODELS[TINY])
    tokenizer.chat_template = "{{ tools | tojson }}{{ messages }}"
    record = describe_tokenizer(tokenizer, "qwen3", BUILTIN_MODELS[TINY]).record
    assert record is not None and record.response_template is not None
    assert "tool_calls" in record.response_template["fields"]


def test_a_format_detected_from_the_chat_template_needs_no_response_template() -> None:
    """So the server parses its calls without transformers."""
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODELS[TINY])
    record = describe_tokenizer(tokenizer, "qwen3", BUILTIN_MODELS[TINY]).record
    assert record is not None and record.response_template is None
    for item in (store_and_load(tokenizer, BUILTIN_MODELS[TINY]), tokenizer):
        tools = ToolSupport(item, "qwen3")
        tools.check([{"type": "function", "function": {"name": "clock"}}])


def test_tokenizers_that_compute_in_python_are_not_stored() -> None:
    class OwnDecode(PreTrainedTokenizerFast):
        def decode(self, *arguments: Any, **options: Any) -> str:
            return str(super().decode(*arguments, **options)).upper()

    class OwnTemplate(PreTrainedTokenizerFast):
        def apply_chat_template(self, *arguments: Any, **options: Any) -> str:
            return "[INST]"

    class OwnIds(PreTrainedTokenizerFast):
        @property
        def all_special_ids(self) -> list[int]:
            return [7]

    folder = BUILTIN_MODELS[TINY]
    for kind, name in ((OwnDecode, "decode"), (OwnTemplate, "apply_chat_template"), (OwnIds, "all_special_ids")):
        described = describe_tokenizer(kind.from_pretrained(folder), "llama", folder)
        assert described == (None, "", f"{kind.__name__} cannot be stored: it overrides {name}")
    assert "_encode_plus" in overridden_methods(CodeLlamaTokenizer)
    assert overridden_methods(Qwen2Tokenizer) == [] == overridden_methods(PreTrainedTokenizerFast)
    splitting = AutoTokenizer.from_pretrained(folder, split_special_tokens=True)
    assert "it splits special tokens" in describe_tokenizer(splitting, "llama", folder).problem
    assert "not a tokenizer of the tokenizers library" in describe_tokenizer(object(), "llama", folder).problem


def test_a_response_template_that_json_would_change_is_not_stored() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODELS[TINY])
    for template in ({"fields": {"content": {"close": ("a", "b")}}}, {"fields": {"content": b"text"}}):
        tokenizer.response_template = template
        assert "response template" in describe_tokenizer(tokenizer, "llama", BUILTIN_MODELS[TINY]).problem


def test_a_component_in_python_is_not_stored() -> None:
    class Splitter:
        def pre_tokenize(self, text: Any) -> None:
            text.split(lambda number, part: [part])

    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODELS[TINY])
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Splitter())
    assert "written in Python" in describe_tokenizer(tokenizer, "llama", BUILTIN_MODELS[TINY]).problem


def test_a_damaged_file_of_a_backend_is_an_error_that_names_it(tmp_path: Path) -> None:
    record = describe_tokenizer(AutoTokenizer.from_pretrained(BUILTIN_MODELS[TINY]), "llama", tmp_path).record
    assert record is not None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json cannot be read"):
        load_stored_tokenizer(record, tmp_path, tmp_path)
