"""Request schemas of OpenAI's Responses API. Source: OpenAI's API reference.

The sampling parameters of the other routes are accepted here too. Unsupported fields that would change the response are
rejected by name, through RESPONSES_INERT_VALUES, the validators below or routes.py. Does not import torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Discriminator, Field, StrictBool, StrictStr, Tag

from tcdeploy.server.apis.openai.field_types import (
    LONG_TOOL_NAME_PATTERN,
    MAX_TOOLS,
    MaxTokens,
    NestedFields,
    Stop,
    at_most,
    check_kind,
    check_tool,
)
from tcdeploy.server.apis.openai.protocol import MAX_MESSAGES, MAX_PARTS, MEDIA, ReasoningEffort, SamplingRequest
from tcdeploy.server.apis.openai.unsupported_fields import CONSTRAINT_INERT_VALUES, INERT_VALUES
from tcdeploy.server.output.structured.output_constraint import JsonObjectFormat, TextFormat

ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
PART_TYPES = ("input_text", "output_text", "refusal", "text", "reasoning_text", "summary_text")
UNSUPPORTED_ITEMS = {"item_reference": "references to items"}
MAX_METADATA = 16  # OpenAI's limit
MAX_INCLUDES = 1024
# Unsupported fields, and fields of the other APIs -> values that have no effect and are accepted.
RESPONSES_INERT_VALUES: dict[str, tuple[Any, ...]] = {
    **INERT_VALUES,
    **CONSTRAINT_INERT_VALUES,
    "access_programs": (), "background": (False,), "background_options": (), "context_management": ([],),
    "conversation": (), "image": (), "max_tool_calls": (), "moderation": (), "prompt": (), "top_logprobs": (0,),
    "truncation": ("disabled",),
    # fields of the other APIs
    "add_generation_prompt": (), "add_special_tokens": (), "continue_final_message": (False,), "logprobs": (False,),
    "max_completion_tokens": (), "max_tokens": (), "messages": ([],), "n": (1,), "prompt_logprobs": (),
    "reasoning_effort": (), "response_format": ({"type": "text"},), "return_token_ids": (False,),
    "stop_sequences": ([],), "system": (), "thinking": (), "truncate_prompt_tokens": (),
}  # fmt: skip
RESPONSES_FIELD_NAMES = {  # field of ChatRequest -> its name in this API
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


class Part(NestedFields):
    """A text in a message, in the result of a call or in reasoning."""

    place = "input.content"
    no_effect = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: StrictStr


class InputRefusal(NestedFields):
    place = "input.content"

    type: Literal["refusal"]
    text: StrictStr = Field(alias="refusal")


def _as_parts(content: Any) -> Any:
    return [Part(type="input_text", text=content)] if isinstance(content, str) else content


ContentPart: TypeAlias = Annotated[Part | InputRefusal, Field(discriminator="type")]
Content: TypeAlias = Annotated[
    list[ContentPart],
    Field(fail_fast=True, max_length=MAX_PARTS),
    BeforeValidator(_as_parts, json_schema_input_type=str | list[ContentPart]),
]


class _ItemFields(NestedFields):
    place = "input"
    no_effect = frozenset({"id", "status", "phase", "encrypted_content", "caller"})  # of an earlier answer


class MessageItem(_ItemFields):
    type: Literal["message"] | None = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(_ItemFields):
    type: Literal["function_call"]
    call_id: StrictStr
    name: StrictStr
    arguments: StrictStr  # JSON


class FunctionCallOutputItem(_ItemFields):
    type: Literal["function_call_output"]
    call_id: StrictStr
    output: Content


class ReasoningItem(_ItemFields):
    """An earlier reasoning item. `content` is the whole text; other servers may return a `summary` instead."""

    type: Literal["reasoning"]
    summary: Content | None = None
    content: Content | None = None


def _item_type(item: Any) -> Any:
    return item.get("type") or "message" if isinstance(item, dict) else getattr(item, "type", None)


Item: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]


def _check_item(item: Any) -> Any:
    """Raise an error that names the kind of an unsupported item or part."""
    if not isinstance(item, dict):
        return item
    check_kind(item, ITEM_TYPES, UNSUPPORTED_ITEMS, "items", "")
    for name in ("content", "output"):
        parts = item.get(name)
        for index, part in enumerate(parts[:MAX_PARTS] if isinstance(parts, list) else ()):
            check_kind(part, PART_TYPES, MEDIA, "content parts", f".{name}[{index}]")
    return item


CheckedItem: TypeAlias = Annotated[Item, BeforeValidator(_check_item, json_schema_input_type=Item)]


def _as_items(value: Any) -> Any:
    return [MessageItem(role="user", content=_as_parts(value))] if isinstance(value, str) else value


class FunctionTool(NestedFields):
    place = "tools"
    no_effect = frozenset({"defer_loading", "allowed_callers", "async"})  # `check_tool` examines them

    type: Literal["function"]
    name: Annotated[str, Field(pattern=LONG_TOOL_NAME_PATTERN, strict=True)]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


CheckedTool: TypeAlias = Annotated[
    FunctionTool, check_tool("function", {"defer_loading": False, "allowed_callers": ["direct"], "async": False})
]


class FunctionToolChoice(NestedFields):
    place = "tool_choice"

    type: Literal["function"]
    name: StrictStr


class ReasoningConfig(NestedFields):
    place = "reasoning"

    effort: ReasoningEffort | None = None
    summary: StrictStr | None = None
    generate_summary: StrictStr | None = None
    mode: StrictStr | None = None
    context: StrictStr | None = None


class JsonSchemaTextFormat(NestedFields):
    """The output always follows the schema, whatever the value of `strict`."""

    place = "text.format"
    inert_values = {"json_schema": ()}

    type: Literal["json_schema"]
    name: StrictStr | None = None
    description: StrictStr | None = None
    json_schema: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = None


class TextConfig(NestedFields):
    place = "text"

    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaTextFormat, Field(discriminator="type")] | None = None
    verbosity: StrictStr | None = None


class ResponseStreamOptions(NestedFields):
    place = "stream_options"

    include_obfuscation: StrictBool | None = None


class ResponsesRequest(SamplingRequest):
    input: Annotated[
        list[CheckedItem],
        Field(fail_fast=True, max_length=MAX_MESSAGES),
        BeforeValidator(_as_items, json_schema_input_type=str | list[CheckedItem]),
    ]
    instructions: StrictStr | None = None
    max_output_tokens: MaxTokens | None = None
    previous_response_id: StrictStr | None = None
    store: StrictBool | None = None  # default: true
    metadata: (
        Annotated[dict[str, StrictStr], Field(max_length=MAX_METADATA), at_most(MAX_METADATA, "entries")] | None
    ) = None
    tools: Annotated[list[CheckedTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: Annotated[list[StrictStr], Field(fail_fast=True, max_length=MAX_INCLUDES)] | None = None
    stream_options: ResponseStreamOptions | None = None
    stop: Stop | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # These have no effect.
    prompt_cache_key: StrictStr | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: StrictStr | None = None
    safety_identifier: StrictStr | None = None
    service_tier: StrictStr | None = None
    user: StrictStr | None = None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def is_stored(self) -> bool:
        return self.store is not False
