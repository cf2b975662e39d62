"""Formats of tool calls and reasoning by model family, and detection of the format from the chat template.

The table is for models whose tokenizer has no `response_template`, which describes outputs for transformers'
ResponseParser. server/output/tag_parser.py parses outputs in these formats. ResponseParser is not used for them: it
ends a call at the first closing delimiter, also inside a JSON string, and supports neither several JSON objects in a
row nor Python's syntax.

The names are those of vLLM's `--tool-call-parser` and `--reasoning-parser`. Does not import torch or transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from tcdeploy.text.stored_tokenizer import StoredTokenizer

CallSyntax = Literal["json", "python", "xml", "harmony", "template"]


@dataclass(frozen=True)
class ForcedCall:
    """Fixed texts of the calls that a grammar enforces: `start`, calls with `separator` between them, `end`.

    A call is `opening`, `before_name`, the name, `after_name`, the arguments as JSON, `after_arguments` and `closing`.
    With `allows_space`, white space may be next to `opening`, `closing` and `separator`.
    """

    before_name: str
    after_name: str
    after_arguments: str = ""
    separator: str | None = None  # None: one call only
    start: str = ""
    end: str = ""
    opening: str = ""
    closing: str = ""
    allows_space: bool = False

    def example(self, name: str) -> str:
        call = f"{self.opening}{self.before_name}{name}{self.after_name}{{}}{self.after_arguments}{self.closing}"
        return f"{self.start}{call}{self.end}"


@dataclass(frozen=True)
class ToolFormat:
    """Format of tool calls.

    openings: texts that begin a call, or a list of calls.
    header: regex for the text between an opening and the JSON object, without backtracking. If it captures `name`, the
        object contains only the arguments.
    separator: between two objects after one opening; "" if each call has an opening.
    closings: dropped after a call.
    header_delimiters: delimiters that `header` matches, as texts.
    dropped: texts that are dropped between calls, such as the delimiters of a list of calls.
    starts_output: whether a call may begin the output without an opening.
    id_length: characters of a call's id, for templates that require a length; 0: any.
    """

    name: str
    syntax: CallSyntax
    openings: tuple[str, ...] = ()
    header: str = r"\s*"
    header_delimiters: tuple[str, ...] = ()
    separator: str = ""
    closings: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    starts_output: bool = False
    id_length: int = 0
    forced: ForcedCall | None = None

    @property
    def delimiters(self) -> tuple[str, ...]:
        return (*self.openings, *self.header_delimiters, *self.closings, *self.dropped)


@dataclass(frozen=True)
class ReasoningFormat:
    """Reasoning is between the two delimiters. The prompt may contain the first one."""

    name: str
    opening: str
    closing: str


HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
TOOL_FORMATS = {
    item.name: item
    for item in (
        # Hermes 2 Pro and 3, Qwen 2.5 and 3
        ToolFormat(
            "hermes", "json", ("<tool_call>",), closings=("</tool_call>",),
            forced=ForcedCall('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", "\n"),
        ),
        # Llama 3.1 to 3.3, and Llama 4 with a template for JSON
        ToolFormat(
            "llama3_json", "json", ("<|python_tag|>",), separator=";", starts_output=True,
            forced=ForcedCall('{"name": "', '", "parameters": ', "}"),
        ),
        # Mistral: a list of objects, or since Large 2411 a name before the arguments
        ToolFormat(
            "mistral", "json", ("[TOOL_CALLS]",),
            header=r"\s*+(?:\[\s*+|(?P<name>[\w.-]++)\s*+(?:\[CALL_ID\]\s*+\w++\s*+)?(?:\[ARGS\]\s*+)?)?",
            header_delimiters=("[CALL_ID]", "[ARGS]"), separator=",", closings=("]",), id_length=9,
            forced=ForcedCall('{"name": "', '", "arguments": ', "}", ", ", "[TOOL_CALLS] [", "]"),
        ),
        # DeepSeek V3 and R1 (with a code fence), V3.1
        ToolFormat(
            "deepseek_v3", "json", ("<｜tool▁call▁begin｜>",),
            header=r"\s*+(?:function<｜tool▁sep｜>)?(?P<name>[\w.-]++)\s*+(?:<｜tool▁sep｜>\s*+)?(?:```json\s*+)?",
            header_delimiters=("<｜tool▁sep｜>",),
            closings=("```", "<｜tool▁call▁end｜>"), dropped=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
        # Qwen3-Coder
        ToolFormat(
            "qwen3_coder", "xml", ("<tool_call>", "<function="),
            header=r"(?:\s*+<function=|(?<=<function=))(?P<name>[^>\n]++)", closings=("</tool_call>",),
        ),
        # Llama 3.2 with a template for Python's syntax, Llama 4, ToolACE
        ToolFormat("pythonic", "python", ("<|python_start|>",), closings=("<|python_end|>",), starts_output=True),
        # gpt-oss
        ToolFormat(
            "openai", "harmony", HARMONY_TOKENS,
            forced=ForcedCall("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>"),
        ),
    )
}  # fmt: skip
REASONING_FORMATS = {
    item.name: item
    for item in (
        ReasoningFormat("deepseek_r1", "<think>", "</think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("openai_gptoss", "<|channel|>analysis<|message|>", "<|end|>"),
    )
}
TOOL_ALIASES = {
    "llama4_json": "llama3_json", "llama4_pythonic": "pythonic", "qwen3_xml": "qwen3_coder",
    "deepseek_v31": "deepseek_v3", "gpt-oss": "openai",
}  # fmt: skip
REASONING_ALIASES = {"qwen3": "deepseek_r1", "deepseek_v3": "deepseek_r1", "gpt-oss": "openai_gptoss"}
TOOL_PARSERS = ("auto", *TOOL_FORMATS, *TOOL_ALIASES)
REASONING_PARSERS = ("auto", "none", *REASONING_FORMATS, *REASONING_ALIASES)
# Texts in chat templates that identify a format. The first format whose texts all occur is used.
TOOL_MARKS = (
    (("<|channel|>", "<|message|>"), "openai"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v3"),
    (("<tool_call>", "<function=", "<parameter="), "qwen3_coder"),
    (("<tool_call>", "arguments"), "hermes"),
    (("[func_name1(",), "pythonic"),
    (('{"name": function name, "parameters":',), "llama3_json"),
    (("<|python_tag|>", '"parameters"'), "llama3_json"),
)
# Texts of families that are not in the table, but whose templates also contain the texts of a format in it.
OTHER_FORMAT_MARKS = ("<arg_key>", "<|tool_call>")
REASONING_MARKS = (
    (("<|channel|>", "<|message|>"), "openai_gptoss"), (("[THINK]",), "mistral"), (("</think>",), "deepseek_r1"),
    (("<think>",), "deepseek_r1"),
)  # fmt: skip


def template_text(chat_template: Any) -> str:
    """The text of a tokenizer's `chat_template`, which may be a dict of templates by name, or None."""
    return "\n".join(chat_template.values()) if isinstance(chat_template, dict) else chat_template or ""


def tool_format(parser: str, chat_template: str) -> ToolFormat | None:
    """The format of this name; with "auto", the one that is detected from the chat template, if any."""
    if parser != "auto":
        return TOOL_FORMATS[TOOL_ALIASES.get(parser, parser)]
    if any(mark in chat_template for mark in OTHER_FORMAT_MARKS):
        return None
    return next((TOOL_FORMATS[name] for marks, name in TOOL_MARKS if all(m in chat_template for m in marks)), None)


def reasoning_format(parser: str, chat_template: str) -> ReasoningFormat | None:
    """The format of this name, None for "none"; with "auto", the one detected from the chat template, if any."""
    if parser == "auto":
        names = (name for marks, name in REASONING_MARKS if all(mark in chat_template for mark in marks))
        return next((REASONING_FORMATS[name] for name in names), None)
    return REASONING_FORMATS.get(REASONING_ALIASES.get(parser, parser))


def response_template(tokenizer: Any, model_type: str) -> dict[str, Any] | None:
    """The tokenizer's, else its family's in transformers, unless a format of this module is detected; or None."""
    if isinstance(tokenizer, StoredTokenizer):  # its template was looked up when the tokenizer was stored
        return tokenizer.response_template
    template = getattr(tokenizer, "response_template", None)
    if template is None and tool_format("auto", template_text(getattr(tokenizer, "chat_template", None))) is None:
        try:
            from transformers.cli.serving.utils import get_response_template
        except ImportError:  # the internal table has moved: tools are then rejected
            return None
        model = SimpleNamespace(config=SimpleNamespace(model_type=model_type))  # it reads nothing else of a model
        template = get_response_template(tokenizer, model)
    return None if template is None else dict(template)
