"""Outputs of each family are split into content, reasoning and calls, however the text is cut into pieces."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tcdeploy.models.load import resolve_model_path
from tcdeploy.server.apis.openai.protocol import ApiError, ChatRequest
from tcdeploy.server.output import python_calls
from tcdeploy.server.output.harmony_parser import HarmonyParser
from tcdeploy.server.output.parser import OutputEnd, OutputParser, split_by_kind
from tcdeploy.server.output.structured.structured_output import StructuredOutputBackend
from tcdeploy.server.output.tag_parser import TagParser
from tcdeploy.server.output.tools import ToolSupport
from tcdeploy.server.output.xml_calls import convert
from tcdeploy.text.stop_strings import StopStringDetokenizer
from tcdeploy.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS
from tests.conftest import TINY
from tests.fork_server import ForkServer
from tests.server.conftest import ServerProcess, serving
from tests.server.test_tools import CLOCK, SCHEMAS, WEATHER, chat, chat_request, load

NOTE = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"}, "tree": {"type": "object"}, "count": {"type": "integer"},
                "share": {"type": ["number", "null"]}, "open": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            },
        },
    },
}  # fmt: skip
TOOLS = [CLOCK, NOTE]
TEXT = "Grüße ☃ \"}]) </tool_call>;</function></parameter> [TOOL_CALLS] <|call|> \\ '`` "
ARGUMENTS = {"text": TEXT, "tree": {"a": [1, {"b": "}"}]}}
JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
CALLS = [("clock", {"utc": True}), ("note", ARGUMENTS)]


def harmony(channel: str, text: str, end: str = "<|end|>") -> str:
    return f"<|channel|>{channel}<|message|>{text}{end}<|start|>assistant"


# Format -> outputs with the two calls, and content before and after them where the format allows it.
OUTPUTS: dict[str, list[tuple[str, str]]] = {
    "hermes": [(
        f'I look. \n<tool_call>\n{{"name": "clock", "arguments": {{"utc": true}}}}\n</tool_call>\n'
        f'<tool_call>{{"arguments": {JSON}, "name": "note"}}</tool_call>\nDone. ', "I look.\nDone. ",
    )],
    "llama3_json": [
        (f'{{"name": "clock", "parameters": {{"utc": true}}}}; {{"name": "note", "parameters": {JSON}}}', ""),
        (f'I look.<|python_tag|>{{"type": "function", "name": "clock", "parameters": {{"utc": true}}}};'
         f'{{"name": "note", "parameters": {JSON}}}\nDone.', "I look.\nDone."),
    ],
    "mistral": [
        (f'I look.[TOOL_CALLS] [{{"name": "clock", "arguments": {{"utc": true}}}}, '
         f'{{"name": "note", "arguments": {JSON}, "id": "123456789"}}]', "I look."),
        (f'I look.\n[TOOL_CALLS]clock[ARGS]{{"utc": true}}[TOOL_CALLS]note[CALL_ID]123456789[ARGS]{JSON}', "I look."),
        (f'[TOOL_CALLS]clock{{"utc": true}}[TOOL_CALLS]note{JSON}', ""),
    ],
    "deepseek_v3": [
        (f'I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{{"utc": true}}\n```'
         f"<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>note\n```json\n{JSON}\n```<｜tool▁call▁end｜>"
         "<｜tool▁calls▁end｜>", "I look."),
        (f'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{{"utc": true}}<｜tool▁call▁end｜>'
         f"<｜tool▁call▁begin｜>note<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", ""),
    ],
    "qwen3_coder": [
        (f"I look.\n<tool_call>\n<function=clock>\n<parameter=utc>\ntrue\n</parameter>\n</function>\n</tool_call>\n"
         f"<tool_call>\n<function=note>\n<parameter=text>\n{TEXT}\n</parameter>\n<parameter=tree>\n"
         f'{{"a": [1, {{"b": "}}"}}]}}\n</parameter>\n</function>\n</tool_call>\nDone.', "I look.\nDone."),
        (f"<function=clock><parameter=utc>True</parameter></function><function=note><parameter=text>{TEXT}</parameter>"
         '<parameter=tree>{"a": [1, {"b": "}"}]}</parameter></function>', ""),
    ],
    "pythonic": [
        (f"[clock(utc=True), note(text={TEXT!r}, tree={{'a': [1, {{'b': '}}'}}]}})]", ""),
        (f"I look.<|python_start|>[clock(utc=true),\n note(text={json.dumps(TEXT)}, tree={{'a': (1, {{'b': '}}'}})}}"
         ")]<|python_end|>Done.", "I look.\nDone."),
    ],
    "openai": [
        (harmony("commentary", "I look.") + harmony(
            "commentary to=functions.clock <|constrain|>json", '{"utc": true}', "<|call|>"
         ) + f" to=functions.note<|channel|>commentary json<|message|>{JSON}<|call|><|start|>assistant"
         + harmony("final", "Done.", "<|return|>"), "I look.\nDone."),
    ],
}  # fmt: skip
CASES = [(name, *case) for name, cases in OUTPUTS.items() for case in cases]


def new_parser(name: str, **options: Any) -> OutputParser:
    if name == "openai":
        return HarmonyParser(**options)
    return TagParser(TOOL_FORMATS[name], REASONING_FORMATS["deepseek_r1"], TOOLS, **options)


def read(parser: OutputParser, pieces: list[str], end: OutputEnd = "complete") -> tuple[str, str, list[Any]]:
    """Content, reasoning and calls of an output. The arguments of a call that is cut stay text."""
    parts = [*(part for piece in pieces for part in parser.push(piece)), *parser.finish(end)]
    content, reasoning, calls = split_by_kind(parts)
    assert [call.number for call in calls] == list(range(len(calls)))
    assert parser.has_calls == bool(calls)
    return content, reasoning, [(call.name, arguments_of(call.arguments)) for call in calls]


def arguments_of(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def characters(text: str) -> list[str]:
    return list(text)


@pytest.mark.parametrize(("name", "text", "content"), CASES)
def test_calls_and_content_are_the_same_however_the_text_is_cut(name: str, text: str, content: str) -> None:
    expected = (content, "", CALLS)
    assert read(new_parser(name), [text]) == read(new_parser(name), characters(text)) == expected
    for index in range(1, len(text)):
        assert read(new_parser(name), [text[:index], text[index:]]) == expected, text[:index]


@pytest.mark.parametrize(("name", "text", "content"), CASES)
def test_an_output_that_is_cut_has_the_call_as_far_as_it_came(
    name: str, text: str, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls that were complete stay; the next one has its name and the beginning of its arguments."""
    num_cut = 0
    for index in range(len(text)):
        parser = new_parser(name)
        cut_content, _, calls = read(parser, [text[:index]], "length")
        complete = [call for call in calls if isinstance(call[1], dict) and call in CALLS]
        assert complete == CALLS[: len(complete)]
        if cut := calls[len(complete) :]:
            [(called, arguments)] = cut
            num_cut += 1
            assert called == CALLS[len(complete)][0]
            assert arguments == {} or JSON.startswith(arguments) or '{"utc": true}'.startswith(arguments)
            assert "{" not in cut_content, "the text of the call is content too"
        assert read(new_parser(name), characters(text[:index]), "length") == (cut_content, "", calls)
        assert parser.num_malformed == 0
    assert num_cut > 10 and not caplog.text


def test_a_space_at_the_cut_of_a_text_is_kept() -> None:
    [(name, arguments)] = read(new_parser("mistral"), ['[TOOL_CALLS]note[ARGS]{"text": "a '], "length")[2]
    assert (name, arguments) == ("note", '{"text": "a ')


@pytest.mark.parametrize(("name", "text", "content"), CASES)
def test_a_call_that_does_not_end_is_content_and_counted_unless_a_stop_string_cut_it(
    name: str, text: str, content: str
) -> None:
    end = text.rindex(" \\") + 2  # inside the second call
    for reason, num_malformed in (("complete", 1), ("stop_string", 0)):
        parser = new_parser(name)
        cut_content, _, calls = read(parser, [text[:end]], reason)  # type: ignore[arg-type]
        if name == "qwen3_coder" and reason == "complete":  # whose closing tags may be missing at the end
            assert calls[:1] == CALLS[:1] and [called for called, _ in calls] == ["clock", "note"]
            continue
        is_one_list = name == "pythonic"  # whose calls are parsed together
        assert calls == ([] if is_one_list else CALLS[:1])
        assert name == "openai" or cut_content.endswith(text[end - 30 : end])  # its delimiters are tokens, not text
        assert parser.num_malformed == (0 if text.startswith("[clock") else num_malformed)


MALFORMED = {
    "hermes": [
        "<tool_call>{no json}</tool_call>", '<tool_call>["a"]</tool_call>', "<tool_call></tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>', '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"utc": true}</tool_call>', "<tool_call>" + '{"a":' * 5000 + "}",
        '<tool_call>{"name": "clock", "arguments": "{"}</tool_call>',
        '<tool_call>{"name": "clock", "arguments": {"utc": NaN}}</tool_call>',
    ],
    "mistral": [
        "[TOOL_CALLS] [1]", "[TOOL_CALLS]two words{}", '[TOOL_CALLS]clock[ARGS]{"a"}', "[TOOL_CALLS] " + "a" * 300,
    ],
    "deepseek_v3": ["<｜tool▁call▁begin｜>two words<｜tool▁sep｜>{}", "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>5"],
    "qwen3_coder": [
        "<tool_call>\n{}</tool_call>", "<function=clock>text</function>",
        "<function=clock><parameter=utc>true</parameter> x",
        "<function=" + "a" * 300, "<tool_call>\n<function>",
        "<function=clock><parameter=" + "a" * 300,
    ],
    "pythonic": [
        "<|python_start|>[clock(True)]", "<|python_start|>[clock(utc=other)]", "<|python_start|>[1]",
        "<|python_start|>[clock(**a)]", "<|python_start|>[a()()]",
        "<|python_start|>[clock(utc=" + "(" * 500 + ")" * 501,
    ],
    "llama3_json": ["<|python_tag|>print(1)", '<|python_tag|>{"name": "clock", "parameters": 5}'],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in MALFORMED.items() for text in texts])
def test_a_malformed_call_is_content_and_the_next_call_is_read(
    name: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = {
        "hermes": '<tool_call>{"name": "clock"}</tool_call>', "mistral": "[TOOL_CALLS]clock[ARGS]{}",
        "deepseek_v3": "<｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "qwen3_coder": "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        "pythonic": "<|python_start|>[clock()]<|python_end|>", "llama3_json": '<|python_tag|>{"name": "clock"}',
    }  # fmt: skip
    for pieces in ([text], characters(text)):
        parser = new_parser(name)
        assert read(parser, pieces) == (text, "", []) and parser.num_malformed == 1
    assert "cannot parse a tool call" in caplog.text
    if text.endswith((">", "]", "}")):
        assert read(new_parser(name), [text, good[name]]) == (text, "", [("clock", {})])


@pytest.mark.parametrize(
    ("name", "text", "content", "num_calls"),
    [
        ("llama3_json", '{"name": "clock"}\n{"name": "clock"}', "", 2),
        ("llama3_json", '{"name": "clock"} {"name": "clock", "parameters": {}};\n {"name": "clock"}', "", 3),
        ("llama3_json", '<|python_tag|>{"name": "clock"}\n\n{"name": "clock"}\nDone.', "Done.", 2),
        ("llama3_json", '{"name": "clock"}\n{"answer": 5}', '{"answer": 5}', 1),
        ("llama3_json", '{"name": "clock"}\n{"name": "Bob"}', '{"name": "Bob"}', 1),
        ("llama3_json", '{"name": "clock", "age": 5}', '{"name": "clock", "age": 5}', 0),
        ("hermes", '<tool_call>{"name": "clock"}\n{"name": "clock"}</tool_call>', "", 2),
        ("hermes", '<tool_call>{"name": "clock"}</tool_call>{"a": 1}', '{"a": 1}', 1),
        ("hermes", '<tool_call>{"name": "clock"}', "", 1),
        ("mistral", '[TOOL_CALLS] [{"name": "clock"}\n{"name": "clock"}]', "", 2),
        ("mistral", '[TOOL_CALLS] [{"name": "clock"}, {"name": "clock"}', "", 2),
        ("mistral", '[TOOL_CALLS] [{"name": "clock"}] {"a": 1}', '{"a": 1}', 1),
        ("mistral", '[TOOL_CALLS]clock[ARGS]{} {"a": 1}', '{"a": 1}', 1),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}", "", 1),
        ("qwen3_coder", "<function=clock>", "", 1),
        ("qwen3_coder", "<tool_call>\n<function=clock>\n<parameter=utc>\nyes", "", 1),
        ("qwen3_coder", "<function=clock><parameter=utc>yes</parameter>\n", "", 1),
        ("qwen3_coder", "<tool_call><function=clock><parameter=utc>yes</parameter></tool_call>Done.", "Done.", 1),
        ("qwen3_coder", "<function=clock><parameter=utc>yes</function> x", "x", 1),
        ("qwen3_coder", "<function=clock><parameter=utc>yes\n<parameter=other>a</function>", "", 1),
        ("qwen3_coder", "<tool_call><function=clock><parameter=utc>yes\n</function>\n</tool_call>\n" * 3, "", 3),
        ("qwen3_coder", "<function=clock><parameter=utc>yes</function>" * 3, "", 3),
        ("pythonic", "[get-time(zone='\\x41' 'b\nc'), clock(utc=(True),)]", "", 2),
        ("openai", harmony("commentary to=functions.clock", '{"a": "') + harmony("final", "Yes."), '{"a": "\nYes.', 0),
    ],
)  # fmt: skip
def test_missing_separators_and_closing_delimiters(name: str, text: str, content: str, num_calls: int) -> None:
    """As the models' own parsers read them."""
    tools = [*TOOLS, {"type": "function", "function": {"name": "get-time"}}]
    for pieces in ([text], characters(text)):
        is_harmony = name == "openai"
        parser = HarmonyParser() if is_harmony else TagParser(TOOL_FORMATS[name], None, tools)
        found, _, calls = read(parser, pieces)
        assert (found, len(calls)) == (content, num_calls)
        for _, arguments in calls:
            assert arguments in ({}, {"utc": "yes"}, {"utc": "yes", "other": "a"}, {"zone": "Ab\nc"}, {"utc": True})


@pytest.mark.parametrize(("name", "text", "content"), CASES)
def test_a_call_is_found_in_reasoning_that_is_not_closed(name: str, text: str, content: str) -> None:
    """The call must end the output, and begin with a delimiter."""
    if name == "openai" or not text.startswith(("I look", "<", "[TOOL")):
        return
    call = text[: text.index("Done.")] if "Done." in text else text
    for pieces in ([f"<think>Hm {call}"], characters(f"<think>Hm {call}")):
        found, reasoning, calls = read(new_parser(name), pieces)
        assert (found, calls) == ("", CALLS) and reasoning.split() == f"Hm {content[:7]}".split()
    for ending in ("Done.", "</think>Done."):
        text = f"<think>Hm {call}{ending}"
        for pieces in ([text], characters(text)):
            found, reasoning, calls = read(new_parser(name), pieces)
            assert (found, reasoning, calls) == (
                "Done." if "/" in ending else "", f"Hm {call}".strip() if "/" in ending else f"Hm {call}Done.", []
            )  # fmt: skip
    cut = f"<think>Hm {call[: call.index('note') + 50]}"
    found, reasoning, calls = read(new_parser(name), characters(cut), "length")
    assert found == "" and calls[:1] == CALLS[:1] and reasoning.startswith("Hm")


def test_a_text_without_delimiter_is_a_call_only_at_the_start_and_of_a_known_function() -> None:
    for name, text in (
        ("llama3_json", '{"answer": 5, "name": "clock"} ok'), ("llama3_json", '{"name": "Bob", "parameters": {}}'),
        ("llama3_json", 'Use {"name": "clock", "parameters": {}}'), ("llama3_json", "{"),
        ("llama3_json", ' {"name" 5}'),
        ("pythonic", "[1, 2]"), ("pythonic", "[other(utc=True)]"), ("pythonic", "Use [clock(utc=True)]"),
        ("pythonic", "[clock(utc=True) or not]"), ("hermes", "a <tool_cal <b"), ("hermes", " plain text \n"),
    ):  # fmt: skip
        for pieces in ([text], characters(text)):
            parser = new_parser(name)
            assert (read(parser, pieces), parser.num_malformed) == ((text, "", []), 0)


def test_json_that_is_no_call_is_streamed() -> None:
    parser = new_parser("llama3_json")
    parts = [*parser.push('{"answer": '), *parser.push("5, ")]
    assert split_by_kind(parts).content == '{"answer": 5,'


def test_a_delimiter_is_not_searched_in_a_text_without_end() -> None:
    """Otherwise each token would search the whole text again."""
    for start in ("<tool_call>" + " " * 257, "<function=note><parameter=" + "a" * 200):
        assert split_by_kind(new_parser("qwen3_coder").push(start)).content.startswith("<")
        for text in (f"{start}b", f"{start}<function=clock></function>", f"{start}=a></parameter></function>"):
            assert read(new_parser("qwen3_coder"), [text]) == read(new_parser("qwen3_coder"), characters(text))
    text = " " * 257 + "<think>Hm.</think>"
    for pieces in ([text], characters(text)):
        assert read(new_parser("hermes"), pieces) == (text, "", [])


@pytest.mark.parametrize("start", ["a", "<think>a", '<tool_call>{"name": "clock"}'])
def test_white_space_is_not_copied_with_each_token(start: str) -> None:
    parser = TagParser(TOOL_FORMATS["hermes"], REASONING_FORMATS["deepseek_r1"], TOOLS)
    parser.push(start)
    for _ in range(100):
        parser.push(" " * 1000)
    tracemalloc.start()
    parser.push(" ")
    copied = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert copied < 10_000


def test_a_call_inside_of_a_malformed_one_is_text() -> None:
    inner = '<tool_call>{"name": "clock"}</tool_call>'
    for outer in ('<tool_call>{"name": "note", "arguments": {"text": "%s" 5}}', '<tool_call>{"text": "%s'):
        text = outer % inner.replace('"', '\\"')
        for pieces in ([text], characters(text)):
            parser = new_parser("hermes")
            assert (read(parser, pieces), parser.num_malformed) == ((text, "", []), 1)


@pytest.mark.parametrize(
    ("name", "start", "unit", "sizes"),
    [
        ("pythonic", "[note(text=f'", "{1}", (10_000, 40_000)),
        ("openai", "", "<|start|>", (10_000, 40_000)),
        ("hermes", '<tool_call>{"name": "note"', ', "a": 1', (10_000, 40_000)),
        ("deepseek_v3", "<｜tool▁call▁begin｜>a", " ", (60, 240)),
    ],
)
@pytest.mark.parametrize("size", [4, 1 << 20], ids=["tokens", "whole"])
def test_the_time_is_linear(name: str, start: str, unit: str, sizes: tuple[int, int], size: int) -> None:
    def cpu_seconds(num_chars: int) -> float:
        text = f"{start}{unit * (num_chars // len(unit))}x{{"
        text *= 20 if num_chars < 1000 else 1
        parser = new_parser(name)
        begin = time.thread_time()
        read(parser, [text[index : index + size] for index in range(0, len(text), size)])
        return time.thread_time() - begin

    small, large = (min(cpu_seconds(num_chars) for _ in range(3)) for num_chars in sizes)
    assert large < 9 * max(small, 0.002), (small, large)  # 16 times if it is quadratic


@pytest.mark.parametrize(
    ("name", "start", "unit", "rest", "end"),
    [
        ("pythonic", '<|python_start|>[note(text="', "a", '!", more="', "length"),
        ("pythonic", "<|python_start|>[", " ", "1(text=2)]", "complete"),
        ("qwen3_coder", "<function=note>", "<parameter=text>a", "", "complete"),
    ],
)
def test_the_end_of_an_output_is_parsed_in_linear_time(
    name: str, start: str, unit: str, rest: str, end: OutputEnd
) -> None:
    def cpu_seconds(num_chars: int) -> float:
        parser = new_parser(name)
        begin = time.thread_time()
        parser.push(start + unit * (num_chars // len(unit)) + rest)
        parser.finish(end)
        return time.thread_time() - begin

    sizes = (30_000, 120_000) if name == "qwen3_coder" else (4_000, 16_000)
    small, large = (min(cpu_seconds(num_chars) for _ in range(3)) for num_chars in sizes)
    assert large < 9 * max(small, 0.002), (small, large)  # 16 times if it is quadratic


def test_many_malformed_calls_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    text = "<tool_call>{]" * 3000
    parser = new_parser("hermes")
    assert read(parser, [text]) == (text, "", []) and parser.num_malformed == 3000
    assert len(caplog.records) == 1


def test_further_calls_are_dropped_without_parallel_calls() -> None:
    for name, text, content in CASES:
        assert read(new_parser(name, max_calls=1), [text]) == (content, "", CALLS[:1])


def test_control_characters_in_strings_are_escaped() -> None:
    text = '<tool_call>{"name": "note", "arguments": {"text": "a\nb\t"}}</tool_call>'
    assert read(new_parser("hermes"), [text])[2] == [("note", {"text": "a\nb\t"})]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("hermes", '<tool_call>{"name": "note", "arguments": {"text": "\\ud800"}}</tool_call>', "\ud800"),
        ("hermes", '<tool_call>{"name": "note", "arguments": {"text": "a\n\\ud800"}}</tool_call>', "a\n\ud800"),
        ("pythonic", "[note(text='\\ud800')]", "\ud800"),
    ],
)  # fmt: skip
def test_arguments_with_lone_surrogates_can_be_encoded(name: str, text: str, value: str) -> None:
    [call] = split_by_kind(new_parser(name).push(text)).calls
    assert call.arguments.encode() and json.loads(call.arguments) == {"text": value}


def test_a_call_in_python_that_is_cut_has_its_complete_arguments() -> None:
    text = "[clock(utc=True), note(text='a, b', count=-5, tree={'a': [1, 2"
    calls = [("clock", '{"utc": true}'), ("note", '{"text": "a, b", "count": -5')]
    assert [call[:2] for call in read(new_parser("pythonic"), [text], "length")[2]] == [
        (name, arguments_of(arguments)) for name, arguments in calls
    ]


def test_a_long_call_in_python_is_translated_while_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Translating it at its end would occupy the event loop: 65 ms for 12,000 numbers."""
    lengths, read_part = [], python_calls._Arguments.read
    monkeypatch.setattr(
        python_calls._Arguments, "read", lambda self, text: lengths.append(len(text)) or read_part(self, text)
    )
    numbers = list(range(12_000))
    [(name, arguments)] = read(new_parser("pythonic"), characters(f"[note(text={numbers})]"))[2]
    assert (name, arguments["text"]) == ("note", numbers)
    assert len(lengths) > len(numbers) and max(lengths) < 20


@pytest.mark.parametrize(
    "value", ["1j", "b'a'", "...", "-'a'", "{**a}", "{[1]: 2}", "f'{x}'", "1e999", "-" * 9999 + "1"]
)
def test_values_in_python_that_are_no_json_are_malformed(value: str) -> None:
    text = f"<|python_start|>[note(text={value})]"
    parser = new_parser("pythonic")
    assert (read(parser, [text]), parser.num_malformed) == ((text, "", []), 1)


def test_arguments_that_are_json_text_are_unwrapped() -> None:
    text = '<tool_call>{"name": "note", "arguments": "{\\"count\\": 5}"}</tool_call>'
    assert read(new_parser("hermes"), [text])[2] == [("note", {"count": 5})]


def test_ids_of_mistral_have_the_length_that_its_templates_require() -> None:
    [call] = split_by_kind(new_parser("mistral").push("[TOOL_CALLS]clock[ARGS]{}")).calls
    assert len(call.id) == 9 and call.id.isalnum()


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("count", "5", 5), ("count", "5.0", 5), ("count", "five", "five"), ("text", "5", "5"), ("text", "null", "null"),
        ("share", "0.5", 0.5), ("share", "None", None), ("open", "False", False), ("open", "null", None),
        ("tree", '{"a": 1}', {"a": 1}), ("tree", "[1]", "[1]"), ("unknown", "5", "5"), ("text", "\n a \n", "\n a \n"),
        ("share", "NaN", "NaN"), ("share", "-1e999", "-1e999"), ("tree", '{"a": NaN}', '{"a": NaN}'),
    ],
)  # fmt: skip
def test_xml_values_have_the_type_of_their_property(key: str, text: str, value: Any) -> None:
    output = f"<function=note><parameter={key}>\n{text}\n</parameter></function>"
    assert read(new_parser("qwen3_coder"), [output])[2] == [("note", {key: value})]


def test_types_of_a_schema_that_is_not_valid_are_ignored() -> None:
    for schema in ({"type": [["integer"], 5]}, {"type": {}}, {"anyOf": [5]}, {"anyOf": 5}, [], None):
        assert convert("5", schema) == "5"


# Reasoning


@pytest.mark.parametrize(
    ("text", "starts_in_reasoning", "content", "reasoning"),
    [
        ("<think>\nHm, <tool_call>.\n</think>\n\nYes. ", False, "Yes. ", "Hm, <tool_call>."),
        ("Hm.</think>Yes. <think> is a tag", True, "Yes. <think> is a tag", "Hm."),
        ("\n<think></think> Yes.", False, "Yes.", ""), ("No <think>Hm.</think>", False, "No <think>Hm.</think>", ""),
        ("Hm", True, "", "Hm"), ("Hm</thi", True, "", "Hm</thi"), (" Yes. \n", False, " Yes. \n", ""),
    ],
)  # fmt: skip
def test_reasoning_is_before_the_content(text: str, starts_in_reasoning: bool, content: str, reasoning: str) -> None:
    for tool_format in (None, TOOL_FORMATS["hermes"], TOOL_FORMATS["llama3_json"]):
        for pieces in ([text], characters(text)):
            parser = TagParser(
                tool_format, REASONING_FORMATS["deepseek_r1"], TOOLS, starts_in_reasoning=starts_in_reasoning
            )
            assert read(parser, pieces) == (content, reasoning, [])


def test_calls_follow_the_reasoning() -> None:
    for name, text, content in CASES:
        if name != "openai":
            assert read(new_parser(name), [f"<think>\nHm.\n</think>\n\n{text}"]) == (content, "Hm.", CALLS)
    text = harmony("analysis", "Hm <think>.") + harmony("final", " Yes. \n", "<|return|>")
    for pieces in ([text], characters(text)):
        assert read(HarmonyParser(), pieces) == ("Yes. \n", "Hm <think>.", [])
    for text in ("plain text", "<|start|>" + "a" * 600, "<|start|><|start|>" * 100 + "<|message|>" + "b" * 600):
        for pieces in ([text], characters(text)):
            assert read(HarmonyParser(), pieces)[0].endswith(text[-10:]), "text that is no message is content"


def test_text_before_the_first_header_is_content() -> None:
    """Such as the rest of a final message that the prompt began."""
    for first, content in ((" there.", " there.\nYes."), ("assistant", "Yes."), (" ", "Yes.")):
        text = f"{first}<|end|><|start|>assistant{harmony('final', 'Yes.', '<|return|>')}"
        for pieces in ([text], characters(text)):
            assert read(HarmonyParser(), pieces) == (content, "", [])


# Which parser a request gets


HERMES_TEMPLATE = """{{- bos_token }}{%- if tools %}
{{- 'Tools: ' + tools | tojson + ' Answer <tool_call>{"name": ..., "arguments": ...}</tool_call>' }}{%- endif %}
{%- for message in messages %}{{- '<|' + message.role + '|>' + message.content }}{{- eos_token }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% if thinks is not defined or thinks %}{{ '<think>\n' }}
{%- else %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{%- endif %}"""


def make_model(folder: Path) -> Path:
    shutil.copytree(resolve_model_path(TINY), folder)
    (folder / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(make_model(tmp_path_factory.mktemp("tokenizer") / "model"))


def parser_of(tools: ToolSupport, request: ChatRequest, prompt: str) -> Any:
    return tools.output_parser(request, prompt).parser


def test_the_parser_follows_from_the_request_the_prompt_and_the_options(tokenizer: Any) -> None:
    tools = ToolSupport(tokenizer, "llama")
    with_tools, plain = chat_request(), chat_request(tools=None)
    assert tools.unsupported_reason == ""
    hermes = '<tool_call>{"name": "clock"}</tool_call>'
    assert read(parser_of(tools, with_tools, "<|assistant|>"), [hermes]) == ("", "", [("clock", {})])
    for request in (with_tools, plain):
        assert read(parser_of(tools, request, "<|assistant|><think>\n"), [f"a</think>{'b'}"]) == ("b", "a", [])
        assert read(parser_of(tools, request, "<think>\n\n</think>\n\n"), ["b"]) == ("b", "", [])
    assert read(parser_of(tools, plain, "<|assistant|>"), [hermes]) == (hermes, "", [])
    continued = chat_request(tools=None, continue_final_message=True)
    assert read(parser_of(tools, continued, "<think>Let me"), [" see</think> Yes"]) == ("Yes", "see", [])
    for final, prompt, starts in (
        ("So", "<|user|>What is <think>?<|assistant|>So", False), ("So", "<think>Hm.</think><|assistant|>So", False),
        ("So", "<|assistant|><think>\nSo", True), ("<think>So", "</think><|assistant|><think>So", True),
        ("<think>a</think>So", "<|assistant|><think>a</think>So", False), ("", "<|assistant|><think>\n", True),
    ):  # fmt: skip
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": final}]
        continued = chat_request(tools=None, continue_final_message=True, messages=messages)
        content, _, _ = read(parser_of(tools, continued, prompt), [" text"])
        assert content == ("" if starts else " text"), prompt
    guided = chat_request(tools=None, guided_regex="a")
    assert parser_of(tools, guided, "<think>\n") is None, "the grammar leaves no room for </think>"
    assert parser_of(ToolSupport(tokenizer, "llama", "auto", "none"), plain, "<think>\n") is None
    assert isinstance(parser_of(ToolSupport(tokenizer, "llama", "openai"), with_tools, ""), HarmonyParser)
    assert isinstance(parser_of(ToolSupport(tokenizer, "llama", "auto", "gpt-oss"), plain, ""), HarmonyParser)


def test_only_special_tokens_that_are_delimiters_have_text(tokenizer: Any) -> None:
    tools = ToolSupport(tokenizer, "llama")
    names = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    hidden = tools.hidden_token_ids(("<|user|>", "a<|end|>b"))
    assert {tokenizer.convert_ids_to_tokens(token_id) for token_id in hidden} == names - {"<|user|>", "<|end|>"}


def test_delimiters_that_are_special_tokens_reach_the_parser_and_others_not_the_content(tmp_path: Path) -> None:
    tokenizer = load(make_model(tmp_path / "model"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    tools = ToolSupport(tokenizer, "llama", "mistral")
    selected = tools.output_parser(chat_request(), "<|assistant|>")
    assert selected.parser is not None and selected.shown_delimiters is not None
    detokenizer = StopStringDetokenizer(tokenizer, (), False, tools.hidden_token_ids(selected.shown_delimiters))
    ids = tokenizer('<|user|>Done.[TOOL_CALLS]clock[ARGS]{"utc": true}<|end|>', add_special_tokens=False).input_ids
    pieces = [*map(detokenizer.push, ids), detokenizer.finish()]
    assert read(selected.parser, pieces) == ("Done.", "", [("clock", {"utc": True})])


@pytest.mark.parametrize("name", [name for name, item in TOOL_FORMATS.items() if item.forced])
@pytest.mark.parametrize("is_special", [False, True], ids=["text", "tokens"])
def test_forced_calls_follow_the_format(tmp_path: Path, name: str, is_special: bool) -> None:
    """The parser reads what the grammar enforces, with delimiters that are text or special tokens."""
    tokenizer = load(make_model(tmp_path / "model"))
    if is_special:
        tokenizer.add_special_tokens({"additional_special_tokens": list(TOOL_FORMATS[name].delimiters)})
    tools = ToolSupport(tokenizer, "llama", name, "none")
    request = chat_request(tool_choice="required")
    structured_output = StructuredOutputBackend(tokenizer, (2,))
    grammar = asyncio.run(structured_output.compile_lark(tools.grammar(request, "<|assistant|>"), "tools"))
    forced = TOOL_FORMATS[name].forced
    assert forced is not None
    bodies = [
        f"{forced.before_name}{called}{forced.after_name}{arguments}{forced.after_arguments}"
        for called, arguments in (("get_weather", '{"city": "Oslo", "days": 3}'), ("clock", '{"utc": true}'))
    ]
    for calls in (bodies[:1], bodies) if forced.separator else (bodies[:1],):
        text = f"{forced.start}{(forced.separator or '').join(calls)}{forced.end}"
        matcher = grammar.start()
        statuses = [matcher.accept(token) for token in tokenizer(text, add_special_tokens=False).input_ids]
        assert statuses[:-1] == [""] * (len(statuses) - 1), text
        assert statuses[-1] == "stop" or matcher.accept(2) == "stop", text
        assert len(read(parser_of(tools, request, ""), [text])[2]) == len(calls)
    matcher = grammar.start()
    wrong = tokenizer(bodies[0].replace("Oslo", "Bonn"), add_special_tokens=False).input_ids
    assert [matcher.accept(token) for token in wrong][-1] == "error"


def test_formats_without_fixed_texts_cannot_be_forced(tokenizer: Any) -> None:
    for name in ("pythonic", "qwen3_coder"):
        with pytest.raises(ApiError, match="none or auto"):
            ToolSupport(tokenizer, "llama", name).grammar(chat_request(tool_choice="required"), "<|assistant|>")


# With a real server


@pytest.fixture(scope="module")
def thinking_server(
    tmp_path_factory: pytest.TempPathFactory, warm_cache: Path, fork_server: ForkServer
) -> Iterator[ServerProcess]:
    """The chat template opens the reasoning in the prompt."""
    folder = make_model(tmp_path_factory.mktemp("thinking") / "model")
    home = tmp_path_factory.mktemp("home")
    with serving(home, warm_cache, "--served-model-name", TINY, model=str(folder), fork_server=fork_server) as started:
        yield started


def test_a_forced_call_ends_the_reasoning_that_the_prompt_opened(thinking_server: ServerProcess) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1, "seed": 3}
    for thinks in (True, False):
        template_kwargs = {"chat_template_kwargs": {"thinks": thinks}}
        [choice] = chat(thinking_server, **fields, extra_body=template_kwargs).choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        [call] = choice.message.tool_calls
        assert call.function.name in SCHEMAS and isinstance(json.loads(call.function.arguments), dict)


def test_reasoning_is_returned_without_tools_too(thinking_server: ServerProcess) -> None:
    fields: dict[str, Any] = {"tools": openai.NOT_GIVEN, "max_tokens": 20}
    [whole] = chat(thinking_server, **fields).choices
    deltas = [chunk.choices[0].delta for chunk in chat(thinking_server, **fields, stream=True)]
    assert whole.message.content == "" and whole.message.reasoning_content
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == whole.message.reasoning_content
    assert not any(delta.content for delta in deltas)
    plain = {"chat_template_kwargs": {"thinks": False}}
    [choice] = chat(thinking_server, **fields, extra_body=plain).choices
    assert choice.message.content and "<|" not in choice.message.content
    assert not hasattr(choice.message, "reasoning_content")


def test_constrained_output_is_content_also_after_a_prompt_that_opens_the_reasoning(
    thinking_server: ServerProcess,
) -> None:
    [choice] = chat(thinking_server, tools=openai.NOT_GIVEN, extra_body={"guided_choice": ["yes", "no"]}).choices
    assert choice.message.content in ("yes", "no") and not hasattr(choice.message, "reasoning_content")


def test_calls_without_force_are_accepted_by_a_server_whose_template_shows_the_format(
    thinking_server: ServerProcess,
) -> None:
    [choice] = chat(thinking_server, tools=[WEATHER], max_tokens=5).choices
    assert choice.finish_reason == "length"
