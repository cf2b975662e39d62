"""Tool calls and reasoning of one model: selects the parser of its outputs, and builds the grammar that forces a call.

Tools enter the prompt through the chat template. Model families delimit calls differently. If the tokenizer has a
`response_template`, transformers' ResponseParser parses the outputs (template_parser.py); after a start without
transformers, the first request with tools imports it. Otherwise the format comes from the table in
text/tool_formats.py; it is detected from the chat template, or selected by --tool-parser. Families in neither are
looked up in transformers' table of response templates.

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
from tcdeploy.server.output.calls_or_content import CallsOrContent, calls_or_content, plain_calls
from tcdeploy.server.output.harmony_parser import HarmonyParser
from tcdeploy.server.output.parser import OutputParser, split_by_kind
from tcdeploy.server.output.structured.json_schema import exact_schemas
from tcdeploy.server.output.tag_parser import TagParser
from tcdeploy.server.output.template_parser import TemplateParser, template_format, template_reasoning
from tcdeploy.text.template_probe import template_form
from tcdeploy.text.tool_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ForcedCall,
    ReasoningFormat,
    ToolFormat,
    reasoning_format,
    response_template,
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
        if self._template is None:
            self._format = tool_format(tool_parser, chat_template)
        else:
            self._format = template_format(self._template)
        self._reasoning = reasoning_format(reasoning_parser, chat_template)
        if self._reasoning is None and reasoning_parser == "auto":
            self._reasoning = template_reasoning(self._template or {})
        template_form(tokenizer, has_tools=True)  # probes the template before the first request

    @property
    def unsupported_reason(self) -> str:
        """Why tools cannot be used, or "". May probe the chat template again, if the first probe ran out of time."""
        if not template_form(self._tokenizer, has_tools=True).renders_tools:
            return "the model's chat template does not render tools"
        if self._format is None:
            return (
                "the model's tokenizer has no response template that describes tool calls, and no known format was "
                "detected in its chat template; serve --tool-parser selects one"
            )
        return self._parser_problem

    @functools.cached_property
    def _parser_problem(self) -> str:
        """Why transformers' parser cannot be used; "" if it can, or is not needed."""
        if self._template is None:
            return ""
        if not is_installed("transformers"):
            return "transformers, which parses tool calls, is not installed (install the extra `compile`)"
        try:
            TemplateParser(self._template, "", [])
        except (ImportError, ValueError) as error:
            return f"the response template of the model's tokenizer is not usable: {error}"
        return ""

    def check(self, tools: list[dict[str, Any]]) -> None:
        """Raises ApiError 400 if `tools` is not empty and their calls cannot be parsed.

        Must not run in the event loop's thread: the first call with tools may import transformers, which takes a
        second, and the chat template may be probed again.
        """
        if tools and (reason := self.unsupported_reason):
            raise bad_request(f"tools are not supported: {reason}", "tools", "unsupported_parameter")

    def output_parser(self, request: ChatRequest, prompt: str) -> SelectedParser:
        """The parser for one choice. `prompt`: the rendered chat, which may end inside the reasoning.

        Without tools, output that follows a constraint of the request is content: its grammar does not allow reasoning.
        """
        tools, has_constraint = request.usable_tools, request.output_constraint is not None
        used, reasoning = self._formats(has_tools=bool(tools))
        if (used is None and reasoning is None) or (has_constraint and not tools):
            return SelectedParser(None)
        max_calls = 1 if request.parallel_tool_calls is False else None
        parser: OutputParser
        if tools and self._template is not None:
            parser = TemplateParser(self._template, prompt, tools, max_calls)
        elif used is not None and used.syntax == "harmony":
            parser = HarmonyParser(max_calls=max_calls)
        else:
            is_open = reasoning is not None and _opens_reasoning(prompt, reasoning, request)
            parser = TagParser(used, reasoning, tools, starts_in_reasoning=is_open, max_calls=max_calls)
        delimiters = (
            *(used.delimiters if used else ()),
            *((reasoning.opening, reasoning.closing) if reasoning else ()),
        )
        if has_constraint and not request.forced_tools:
            return SelectedParser(CallsOrContent(parser), delimiters)
        return SelectedParser(parser, None if isinstance(parser, TemplateParser) else delimiters)

    def _formats(self, *, has_tools: bool) -> tuple[ToolFormat | None, ReasoningFormat | None]:
        """The formats of an output. gpt-oss has one for calls and reasoning, and so has a response template."""
        used = self._format if has_tools else None
        is_harmony = self._reasoning is not None and self._reasoning.name == "openai_gptoss"
        if is_harmony or (used is not None and used.syntax == "harmony"):
            return TOOL_FORMATS["openai"], REASONING_FORMATS["openai_gptoss"]
        return used, template_reasoning(self._template) if has_tools and self._template else self._reasoning

    def hidden_token_ids(self, shown_delimiters: tuple[str, ...]) -> frozenset[int]:
        """The ids of special tokens that occur in none of `shown_delimiters`."""
        if shown_delimiters not in self._hidden_ids:
            shown_text = "\n".join(shown_delimiters)
            added = self._tokenizer.added_tokens_decoder.items()
            self._hidden_ids[shown_delimiters] = frozenset(
                token_id for token_id, token in added if token.special and token.content not in shown_text
            )
        return self._hidden_ids[shown_delimiters]

    def grammar(self, request: ChatRequest, prompt: str) -> str:
        """Grammar for calls of `request.forced_tools`, in llguidance's Lark syntax.

        Raises ApiError 400, and UnsupportedSchemaError for the parameters of a function. Must not run in the event
        loop's thread, because rewriting large schemas takes some 50 ms.
        """
        functions = [tool["function"] for tool in request.forced_tools]
        used, reasoning = self._formats(has_tools=True)
        forced = used.forced if used else None
        if forced and used and used.syntax not in ("template", "harmony") and reasoning:
            is_open = _opens_reasoning(prompt, reasoning, request)
            forced = replace(forced, start=f"{reasoning.closing}\n\n{forced.start}") if is_open else forced
        if forced is None or not self._parses_example(forced.example(functions[0]["name"]), request, prompt):
            raise bad_request(
                "tool_choice must be none or auto for this request: no grammar can enforce the model's format of tool "
                "calls after this prompt", "tool_choice", "unsupported_parameter",
            )  # fmt: skip
        return call_grammar(functions, forced, self._grammar_text, request.allows_multiple_calls)

    def calls_or_content_grammar(self, request: ChatRequest, prompt: str, schema: dict[str, Any]) -> str:
        """Grammar for calls of the tools that the model may call, or JSON of `schema`.

        The arguments of a call follow the schema of their function if it is `strict`. Raises ApiError 400, and
        UnsupportedSchemaError for a schema. Must not run in the event loop's thread, as `grammar`.
        """
        functions = [
            function if function.get("strict") else {**function, "parameters": {"type": "object"}}
            for function in (tool["function"] for tool in request.usable_tools)
        ]
        used, reasoning = self._formats(has_tools=True)
        assert used is not None  # tools are supported
        names = [f"[{function['name']}(" for function in functions] if used.syntax == "python" else []
        if used.starts_output and used.syntax == "json":
            calls = plain_calls(functions)
        elif used.forced is not None:
            allow_multiple = request.parallel_tool_calls is not False
            calls = call_grammar(functions, used.forced, self._grammar_text, allow_multiple)
        elif openings := (*used.openings, *used.dropped, *names):
            calls = f"start: ({' | '.join(map(self._grammar_text, openings))}) rest\nrest: <[*]>*"
        else:
            field = request.constraint_field
            raise bad_request(
                f"{field} cannot be combined with tools, unless tool_choice is none or forces a call: calls in this "
                "model's format do not begin with a fixed text", field, "unsupported_parameter",
            )  # fmt: skip
        is_harmony = used.syntax == "harmony"
        return calls_or_content(
            calls, exact_schemas([schema])[0], self._grammar_text, reasoning=reasoning,
            starts_in_reasoning=reasoning is not None and _opens_reasoning(prompt, reasoning, request),
            after_reasoning="<|start|>assistant" if is_harmony else "",
            before_content="<|channel|>final<|message|>" if is_harmony else "",
        )  # fmt: skip

    def _parses_example(self, example: str, request: ChatRequest, prompt: str) -> bool:
        """Whether the parser parses `example` as one call without content."""
        parser = self.output_parser(request, prompt).parser
        assert parser is not None
        output = split_by_kind([*parser.push(example), *parser.finish()])
        return len(output.calls) == 1 and not (output.content or parser.num_malformed)

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
    """Grammar of calls. `text`: terminals of a fixed text. Each schema is its own document, so its $refs resolve."""
    schemas = exact_schemas([function.get("parameters") or {"type": "object"} for function in functions])
    heads = [text(f"{forced.before_name}{function['name']}{forced.after_name}") for function in functions]
    bodies = " | ".join(f"{head} arguments_{number}" for number, head in enumerate(heads))
    space = "space" if forced.allows_space else ""
    ending = f"{text(forced.after_arguments)} {space} {text(forced.closing)}"
    call = f"call: {text(forced.opening)} {space} ({bodies}) {ending}"
    may_repeat = allow_multiple and forced.separator is not None
    calls = f"call ({text(forced.separator or '')} {space} call)*" if may_repeat else "call"
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
