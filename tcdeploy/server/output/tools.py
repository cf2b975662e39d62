"""Tool calls and reasoning of one model: selects the parser of its outputs, and builds the grammar that forces a call.

Tools enter the prompt through the chat template. Model families delimit calls differently. If the tokenizer has a
`response_template`, transformers' ResponseParser parses the outputs (template_parser.py); after a start without
transformers, the first request with tools imports it. Otherwise the format comes from the table in
text/tool_formats.py; it is detected from the chat template, or selected by --tool-parser. Families in neither are
looked up in transformers' table of response templates.

Outputs are parsed while tokens arrive. Content is streamed as it arrives, except text that may start a call; a call is
sent when it is complete. parser.py describes the handling of truncated and malformed calls.

Arguments are guaranteed to follow their schema only if `tool_choice` forces a call, or if the tool is strict and the
request has an output format (calls_or_content.py). In these cases a grammar enforces the delimiters of calls and the
schema. Such a grammar is available for formats with plain JSON between fixed texts. To force a call, the parser must
also parse an example call after the same prompt.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from tcdeploy.planning.extras import is_installed
from tcdeploy.server.apis.openai.protocol import ChatRequest, bad_request
from tcdeploy.server.output.calls_or_content import CallsOrContent, calls_or_content, open_calls, plain_calls
from tcdeploy.server.output.harmony_parser import HarmonyParser
from tcdeploy.server.output.parser import OutputParser
from tcdeploy.server.output.parts import split
from tcdeploy.server.output.structured.json_schema import exact_schemas
from tcdeploy.server.output.tag_parser import TagParser
from tcdeploy.server.output.template_parser import (
    REASONING_FIELDS,
    TemplateParser,
    find_markup,
    literal_delimiter,
)
from tcdeploy.text.response_template import response_template
from tcdeploy.text.template_probe import template_form
from tcdeploy.text.tool_formats import (
    HARMONY_TOKENS,
    REASONING_FORMATS,
    TOOL_FORMATS,
    ForcedCall,
    ReasoningFormat,
    reasoning_format,
    template_text,
    tool_format,
)


class SelectedParser(NamedTuple):
    """The parser of one choice. `shown_delimiters`: special tokens that must reach the parser as text."""

    parser: OutputParser | None  # None: the text is content
    shown_delimiters: tuple[str, ...] | None = None  # None: all special tokens


class ToolSupport:
    """Tool calls and reasoning of one model."""

    def __init__(
        self, tokenizer: Any, model_type: str, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> None:
        """`tool_parser` and `reasoning_parser` are names in text/tool_formats.py, or "auto"."""
        self._tokenizer = tokenizer
        self._hidden_ids: dict[tuple[str, ...], frozenset[int]] = {}  # by `shown_delimiters`
        chat_template = template_text(tokenizer.chat_template)
        self._template = response_template(tokenizer, model_type) if tool_parser == "auto" else None
        self._format = tool_format(tool_parser, chat_template) if self._template is None else None
        self._reasoning = reasoning_format(reasoning_parser, chat_template)
        if self._reasoning is None and reasoning_parser == "auto":
            self._reasoning = _reasoning_of_template(self._template or {})
        template_form(tokenizer, has_tools=True)  # probes the template before the first request

    @property
    def unsupported_reason(self) -> str:
        """Why tools cannot be used, or "". May probe the chat template again, if the first probe ran out of time."""
        if not template_form(self._tokenizer, has_tools=True).renders_tools:
            return "the model's chat template does not render tools"
        if self._format is None and "tool_calls" not in (self._template or {}).get("fields", {}):
            return (
                "the model's tokenizer has no response template that describes tool calls, and no known format was "
                "detected in its chat template; serve --tool-parser selects one"
            )
        return ""

    def check(self, tools: list[dict[str, Any]]) -> None:
        """Raises ApiError 400 if `tools` is not empty and their calls cannot be parsed.

        Must not run in the event loop's thread: the first call with tools may import transformers, which takes a
        second, and the chat template may be probed again.
        """
        if tools and (reason := self.unsupported_reason or self._parser_problem):
            raise bad_request(f"tools are not supported: {reason}", "tools", "unsupported_parameter")

    def output_parser(self, request: ChatRequest, prompt: str) -> SelectedParser:
        """The parser for one choice. `prompt`: the rendered chat, which may end inside the reasoning.

        Without tools, output that follows a constraint of the request is content: its grammar does not allow reasoning.
        """
        if request.output_constraint is None:
            return self._call_parser(request, prompt)
        if not request.usable_tools:
            return SelectedParser(None)
        selected = self._call_parser(request, prompt)
        assert selected.parser is not None
        if request.forced_tools:
            return selected
        return SelectedParser(CallsOrContent(selected.parser), selected.shown_delimiters or self._template_delimiters)

    def _call_parser(self, request: ChatRequest, prompt: str) -> SelectedParser:
        max_calls = 1 if request.parallel_tool_calls is False else None
        tools, reasoning = request.usable_tools, self._reasoning
        if tools and self._template is not None:
            return SelectedParser(TemplateParser(self._template, prompt, tools, max_calls))
        used_format = self._format if tools else None
        if (used_format is not None and used_format.syntax == "harmony") or _is_harmony(reasoning):
            return SelectedParser(HarmonyParser(max_calls=max_calls), HARMONY_TOKENS)
        if used_format is None and reasoning is None:
            return SelectedParser(None)
        starts_in_reasoning = reasoning is not None and _opens_reasoning(prompt, reasoning, request)
        parser = TagParser(used_format, reasoning, tools, starts_in_reasoning=starts_in_reasoning, max_calls=max_calls)
        delimiters = (reasoning.opening, reasoning.closing) if reasoning else ()
        return SelectedParser(parser, (*delimiters, *(used_format.delimiters if used_format else ())))

    def hidden_token_ids(self, shown_delimiters: tuple[str, ...]) -> frozenset[int]:
        """The ids of special tokens that occur in none of `shown_delimiters`."""
        if shown_delimiters not in self._hidden_ids:
            shown_text = "\n".join(shown_delimiters)
            added = self._tokenizer.added_tokens_decoder.items()
            hidden = frozenset(
                token_id for token_id, token in added if token.special and token.content not in shown_text
            )
            self._hidden_ids[shown_delimiters] = hidden
        return self._hidden_ids[shown_delimiters]

    def grammar(self, request: ChatRequest, prompt: str) -> str:
        """Grammar for calls of `request.forced_tools`, in llguidance's Lark syntax.

        Raises ApiError 400, and UnsupportedSchemaError for the parameters of a function. Must not run in the event
        loop's thread, because rewriting large schemas takes some 50 ms.
        """
        functions = [tool["function"] for tool in request.forced_tools]
        forced, reasoning = self._forced, self._reasoning
        if forced and self._format and reasoning and not _is_harmony(reasoning):
            is_open = _opens_reasoning(prompt, reasoning, request)
            forced = replace(forced, start=f"{reasoning.closing}\n\n{forced.start}") if is_open else forced
        if forced is None or not self._parses_example(forced.example(functions[0]["name"]), request, prompt):
            raise bad_request(
                "tool_choice must be none or auto for this request: no grammar can enforce the model's format of tool "
                "calls after this prompt", "tool_choice", "unsupported_parameter",
            )  # fmt: skip
        return call_grammar(functions, forced, self._grammar_text, request.allows_multiple_calls)

    @property
    def _forced(self) -> ForcedCall | None:
        """The texts of calls that a grammar can enforce, if the model's format has such texts."""
        if self._format is not None:
            return self._format.forced
        markup = find_markup(self._template or {})
        return None if markup is None else markup.forced

    def calls_or_content_grammar(self, request: ChatRequest, prompt: str, schema: dict[str, Any]) -> str:
        """Grammar for calls of the tools that the model may call, or JSON of `schema`.

        The arguments of a call follow the schema of their function if it is `strict`. Raises ApiError 400, and
        UnsupportedSchemaError for a schema. Must not run in the event loop's thread, as `grammar`.
        """
        functions = [
            function if function.get("strict") else {**function, "parameters": {"type": "object"}}
            for function in (tool["function"] for tool in request.usable_tools)
        ]
        allow_multiple = request.parallel_tool_calls is not False
        used, forced = self._format, self._forced
        reasoning = self._reasoning if self._template is None else _reasoning_of_template(self._template)
        if (used is not None and used.syntax == "harmony") or _is_harmony(self._reasoning):
            used, reasoning = TOOL_FORMATS["openai"], REASONING_FORMATS["openai_gptoss"]
            forced = used.forced
        starts_in_reasoning = reasoning is not None and _opens_reasoning(prompt, reasoning, request)
        if used is not None and used.starts_output and used.syntax == "json":
            calls = plain_calls(functions)
        elif forced is not None:
            calls = call_grammar(functions, forced, self._grammar_text, allow_multiple)
        elif openings := self._openings(functions):
            calls = open_calls(openings, self._grammar_text)
        else:
            field = request.constraint_field
            raise bad_request(
                f"{field} cannot be combined with tools, unless tool_choice is none or forces a call: calls in this "
                "model's format do not begin with a fixed text", field, "unsupported_parameter",
            )  # fmt: skip
        is_harmony = used is not None and used.syntax == "harmony"
        return calls_or_content(
            calls, exact_schemas([schema])[0], self._grammar_text,
            reasoning=reasoning, starts_in_reasoning=starts_in_reasoning,
            after_reasoning="<|start|>assistant" if is_harmony else "",
            before_content="<|channel|>final<|message|>" if is_harmony else "",
        )  # fmt: skip

    def _openings(self, functions: list[dict[str, Any]]) -> list[str]:
        """The texts with which a call can begin."""
        if self._format is None:
            return [opening] if (opening := self._template_delimiters[0]) else []
        names = [f"[{function['name']}(" for function in functions] if self._format.syntax == "python" else []
        return [*self._format.openings, *self._format.dropped, *names]

    @property
    def _template_delimiters(self) -> tuple[str, ...]:
        """The fixed delimiters of the response template: of calls, and of reasoning. "" if a text is not fixed."""
        template = self._template or {}
        field, reasoning = template.get("fields", {}).get("tool_calls", {}), _reasoning_of_template(template)
        calls = literal_delimiter(field, "open") or "", literal_delimiter(field, "close") or ""
        return (*calls, reasoning.opening, reasoning.closing) if reasoning else calls

    def _parses_example(self, example: str, request: ChatRequest, prompt: str) -> bool:
        """Whether the parser parses `example` as one call without content."""
        parser = self.output_parser(request, prompt).parser
        assert parser is not None
        output = split([*parser.push(example), *parser.finish()])
        return len(output.calls) == 1 and not (output.content or parser.num_malformed)

    @functools.cached_property
    def _parser_problem(self) -> str:
        """Why transformers' parser cannot be used; "" if it can, or is not needed."""
        if self._template is None:
            return ""
        if not is_installed("transformers"):
            return "transformers, which parses tool calls, is not installed (pip install 'tcdeploy[compile]')"
        try:
            TemplateParser(self._template, "", [])
        except (ImportError, ValueError) as error:
            return f"the response template of the model's tokenizer is not usable: {error}"
        return ""

    def _grammar_text(self, text: str) -> str:
        """A fixed text in a grammar. Added tokens are written as their ids, because special tokens have no text."""
        added = self._tokenizer.added_tokens_decoder.items()
        ids = {token.content: token_id for token_id, token in added if token.content in text}
        if not ids:
            return json.dumps(text) if text else ""
        pattern = "|".join(re.escape(content) for content in sorted(ids, key=len, reverse=True))
        parts = re.split(f"({pattern})", text)
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part)


def call_grammar(
    functions: list[dict[str, Any]], forced: ForcedCall, text: Callable[[str], str], allow_multiple: bool
) -> str:
    """Grammar of one call, or of several. `text` returns the terminals of a fixed text.

    Each schema is a document of its own, so that its $refs resolve.
    """
    schemas = exact_schemas([function.get("parameters") or {"type": "object"} for function in functions])
    heads = [text(f"{forced.before_name}{function['name']}{forced.after_name}") for function in functions]
    bodies = " | ".join(f"{head} arguments_{number}" for number, head in enumerate(heads))
    space = "space" if forced.allows_space else ""
    call = (
        f"call: {text(forced.opening)} {space} ({bodies}) {text(forced.after_arguments)} {space} {text(forced.closing)}"
    )
    calls = "call"
    if allow_multiple and forced.separator is not None:
        calls = f"call ({text(forced.separator)} {space} call)*"
    start = " ".join(filter(None, ("start:", text(forced.start), calls, text(forced.end))))
    rules = [f"arguments_{number}: %json {json.dumps(schema)}" for number, schema in enumerate(schemas)]
    return "\n".join([start, call, *rules, r"space: /[ \n]{0,2}/"])


def _opens_reasoning(prompt: str, reasoning: ReasoningFormat, request: ChatRequest) -> bool:
    """Whether the output begins inside the reasoning: the prompt ends with its opening, or continues a reasoning.

    Earlier messages may mention the delimiters, so they are searched in the final message, or in the whole prompt if
    the template has changed that message.
    """
    if request.continue_final_message and (content := request.messages[-1].text.strip()):
        start = max(0, prompt.rfind(content))
        opening, closing = (prompt.rfind(mark, start) for mark in (reasoning.opening, reasoning.closing))
        if opening != closing:  # at least one is there
            return opening > closing
        prompt = prompt[:start]
    return prompt.rstrip().endswith(reasoning.opening)


def _is_harmony(reasoning: ReasoningFormat | None) -> bool:
    return reasoning is not None and reasoning.name == "openai_gptoss"


def _reasoning_of_template(template: dict[str, Any]) -> ReasoningFormat | None:
    """The reasoning of a response template, if its delimiters are fixed texts."""
    for name in REASONING_FIELDS:
        field = template.get("fields", {}).get(name, {})
        opening, closing = literal_delimiter(field, "open"), literal_delimiter(field, "close")
        if opening is not None and closing is not None:
            return ReasoningFormat("template", opening, closing)
    return None
