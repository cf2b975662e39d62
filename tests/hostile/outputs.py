"""Hostile model outputs: sends random texts through every parser of tool calls and reasoning, in random pieces.

An attack is one output. It succeeds if the result depends on how the text is cut into pieces, if a word of the text is
neither in the content, nor in the reasoning, nor in a call, or if a parser raises an exception. The CPU time of each
parser is measured for repeated delimiters in two sizes.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from typing import Any

from tcdeploy.server.output.calls_or_content import CallsOrContent
from tcdeploy.server.output.harmony_parser import HarmonyParser
from tcdeploy.server.output.parser import OutputEnd, OutputParser, split_by_kind
from tcdeploy.server.output.tag_parser import TagParser
from tcdeploy.server.output.template_parser import TemplateParser
from tcdeploy.text.tool_formats import REASONING_FORMATS, TOOL_FORMATS

DEFAULT_COUNT = 20_000
SMALL, LARGE = 4_000, 16_000  # characters
MAX_RATIO = 9.0  # of the CPU times: 4 if they are linear, 16 if they are quadratic
MAX_TRIES = 5  # measured again while the ratio is larger
TOOLS = [
    {"type": "function", "function": {"name": "clock", "parameters": {"properties": {"utc": {"type": "boolean"}}}}},
    {"type": "function", "function": {"name": "note", "parameters": {"properties": {"text": {"type": "string"}}}}},
]
TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<call>", "close": "</call>", "repeats": True, "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|end|>", "content": "text"},
    },
}  # fmt: skip
CALLS = [
    '{"name": "clock", "arguments": {"utc": true}}', '{"name": "note", "parameters": {"text": "WORD"}}',
    '{"name": "other", "arguments": {"text": "WORD"}}', '[clock(utc=True), note(text="WORD")]', "[note(text='WORD'",
    "<function=note><parameter=text>WORD</parameter></function>", "<function=note><parameter=text>WORD",
    '{"utc": true}', '{"text": "WORD"}', "clock", "note",
]  # fmt: skip
FRAGMENTS = [*"{}[]\"'\\,;:()\n <", "   ", "WORD", "WORD", "```", "</"]


def new_parser(name: str, *, thinks: bool) -> OutputParser:
    if name == "openai":
        return HarmonyParser()
    if name == "template":
        return TemplateParser(TEMPLATE, "<|assistant|>", TOOLS)
    tool_format = TOOL_FORMATS[name.removesuffix("+format")]
    parser = TagParser(tool_format, REASONING_FORMATS["deepseek_r1"], TOOLS, starts_in_reasoning=thinks)
    return CallsOrContent(parser) if name.endswith("+format") else parser


def delimiters(name: str) -> list[str]:
    if name == "template":
        return ["<call>", "</call>", "<think>", "</think>"]
    fixed = list(TOOL_FORMATS[name.removesuffix("+format")].delimiters)
    xml = ["<parameter=text>", "</parameter>", "</function>"] if name == "qwen3_coder" else []
    return [*fixed, *xml, "<think>", "</think>"]


PARSERS = (*TOOL_FORMATS, "hermes+format", "llama3_json+format", "template")


def random_output(source: random.Random, name: str) -> tuple[str, list[str]]:
    """An output, and the words in it."""
    kinds = [delimiters(name), CALLS, FRAGMENTS]
    parts, words = [], []
    for _ in range(source.randrange(1, 14)):
        part = source.choice(source.choices(kinds, (3, 2, 2))[0])
        if "WORD" in part:
            words.append(f"w{source.randrange(10**9)}w")
            part = part.replace("WORD", words[-1])
        parts.append(part)
    return "".join(parts), words


def random_pieces(source: random.Random, text: str) -> list[str]:
    if source.random() < 0.3:
        return list(text)
    cuts = sorted(source.randrange(len(text) + 1) for _ in range(source.randrange(6)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def read(parser: OutputParser, pieces: list[str], end: OutputEnd) -> tuple[str, str, list[Any], int]:
    parts = [*(part for piece in pieces for part in parser.push(piece)), *parser.finish(end)]
    content, reasoning, found = split_by_kind(parts)
    calls = [(call.name, call.arguments) for call in found]
    return content, reasoning, calls, parser.num_malformed


def attack(source: random.Random, name: str) -> str:
    """Why the attack succeeded, or ""."""
    text, words = random_output(source, name)
    thinks, end = source.random() < 0.3, source.choice(["complete", "complete", "length", "stop_string"])
    try:
        whole = read(new_parser(name, thinks=thinks), [text], end)
        for pieces in (list(text), random_pieces(source, text)):
            if (result := read(new_parser(name, thinks=thinks), pieces, end)) != whole:
                return f"{name} {end} {thinks}: {text!r} as {pieces}: {result} is not {whole}"
    except Exception as error:  # any exception is a failure of the parser
        return f"{name}: {text!r}: {error!r}"
    found = json.dumps(whole, ensure_ascii=False)
    lost = [word for word in words if word not in found]
    return f"{name} {end} {thinks}: {text!r} lost {lost}: {whole}" if lost and not may_lose(name, text, end) else ""


def may_lose(name: str, text: str, end: OutputEnd) -> bool:
    """Whether text may be lost: of a cut call, of a header of Harmony, and of members that are repeated or unknown."""
    is_unknown = name == "template" and '"parameters"' in text  # the response template reads `arguments` only
    is_repeated = name == "qwen3_coder" and text.count("<parameter=text>") > 1
    return end == "length" or name == "openai" or is_unknown or is_repeated


def cpu_seconds(name: str, text: str) -> float:
    parser = new_parser(name, thinks=False)
    start = time.thread_time()
    for index in range(0, len(text), 4):
        parser.push(text[index : index + 4])
    parser.finish()
    return time.thread_time() - start


def units(name: str) -> list[str]:
    """Texts that are repeated: each delimiter, alone, in calls and in strings."""
    marks = delimiters(name)
    opening = marks[0]
    return [
        *marks, *(mark + " " * 200 + "x{" for mark in marks), *(f"{opening}{call}\n" for call in CALLS),
        "{", "[", "'", "1,", "\\", " ", "f'{1}'", "<", "</",
    ]  # fmt: skip


def starts(name: str) -> list[str]:
    mark = delimiters(name)[0]
    return ["", "<think>", f'{mark}{{"name": "note", "arguments": {{"text": "', f"{mark}[note(text=", f"{mark}note"]


def slow_outputs(source: random.Random, name: str, count: int) -> list[str]:
    """Of `count` outputs: those for which four times the length takes more than MAX_RATIO times the CPU time."""
    cases = [(start, unit) for start in starts(name) for unit in units(name)]
    slow = []
    for start, unit in source.sample(cases, min(count, len(cases))):
        texts = [start + unit * (size // len(unit)) for size in (SMALL, LARGE)]
        for _ in range(MAX_TRIES):
            small, large = (min(cpu_seconds(name, text) for _ in range(2)) for text in texts)
            if large <= MAX_RATIO * max(small, 0.001):
                break
        else:
            slow.append(f"{name}: {start!r} + {unit[:60]!r} repeated: {large / small:.1f} times the CPU time")
    return slow


def run(source: random.Random, count: int) -> dict[str, Any]:
    """Runs `count` attacks, and measures an output of each parser per 500 attacks."""
    failures, attacks = [], Counter[str]()
    for _ in range(count):
        name = source.choice(PARSERS)
        attacks[name] += 1
        if failure := attack(source, name):
            failures.append(failure)
    slow = [failure for name in PARSERS for failure in slow_outputs(source, name, count // 500)]
    return {
        "attacks": count,
        "by_parser": dict(sorted(attacks.items())),
        "measured_outputs": count // 500 * len(PARSERS),
        "examples": failures[:10] + slow[:10],
        "succeeded": len(failures) + len(slow),
    }
