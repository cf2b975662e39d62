"""Request schemas of Anthropic's Messages API, and its error format. Source: Anthropic's API reference.

The sampling parameters of the other routes are accepted here too. Unsupported fields that would change the response are
rejected by name, through MESSAGES_INERT_VALUES or the validators below. Does not import torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictInt, StrictStr

from tcdeploy.server.apis.openai.field_types import (
    LONG_TOOL_NAME_PATTERN,
    MAX_TOOLS,
    MaxTokens,
    NestedFields,
    StopStrings,
    check_kind,
    check_tool,
)
from tcdeploy.server.apis.openai.protocol import MAX_MESSAGES, MAX_PARTS, ApiError, SamplingRequest
from tcdeploy.server.apis.openai.unsupported_fields import CONSTRAINT_INERT_VALUES, INERT_VALUES
from tcdeploy.server.apis.openai.validation import CONTEXT_LENGTH_EXCEEDED

BLOCK_TYPES = ("text", "thinking", "tool_use", "tool_result")
UNSUPPORTED_BLOCKS = {
    "image": "images", "document": "documents", "search_result": "search results", "container_upload": "files",
    "redacted_thinking": "redacted thinking blocks",
}  # fmt: skip
# Coding agents send it. Thinking of earlier turns is always passed to the chat template here.
KEEP_THINKING = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
# Unsupported fields, and fields of the other APIs -> values that have no effect and are accepted.
MESSAGES_INERT_VALUES: dict[str, tuple[Any, ...]] = {
    **INERT_VALUES,
    **CONSTRAINT_INERT_VALUES,
    "container": (), "context_management": ({}, {"edits": []}, KEEP_THINKING), "diagnostics": (), "mcp_servers": ([],),
    "output_format": (), "speed": ("standard",), "betas": ([],), "fallbacks": ([],), "compaction": (),
    # fields of the other APIs
    "add_generation_prompt": (), "continue_final_message": (False,), "n": (1,), "stop": ([],), "logprobs": (False,),
    "top_logprobs": (0,), "prompt_logprobs": (), "return_token_ids": (False,), "truncate_prompt_tokens": (),
    "add_special_tokens": (), "parallel_tool_calls": (True,), "response_format": ({"type": "text"},),
    "max_completion_tokens": (), "reasoning_effort": (), "stream_options": (),
}  # fmt: skip
MESSAGES_FIELD_NAMES = {  # field of ChatRequest -> its name in this API
    "messages": "messages",  # without the index of a message, which differs
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
}


def _as_blocks(content: Any) -> Any:
    """The content as a list. Raises an error that names the kind of an unsupported block."""
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)]
    for index, block in enumerate(content[:MAX_PARTS] if isinstance(content, list) else ()):
        check_kind(block, BLOCK_TYPES, UNSUPPORTED_BLOCKS, "content blocks", f"[{index}]")
        inner = block.get("content") if isinstance(block, dict) else None
        for number, part in enumerate(inner[:MAX_PARTS] if isinstance(inner, list) else ()):
            check_kind(part, BLOCK_TYPES, UNSUPPORTED_BLOCKS, "content blocks", f"[{index}].content[{number}]")
    return content


class _BlockFields(NestedFields):
    place = "messages.content"
    no_effect = frozenset({"cache_control", "citations", "signature", "caller", "id"})


class TextBlock(_BlockFields):
    type: Literal["text"]
    text: StrictStr


TextBlocks: TypeAlias = Annotated[
    list[TextBlock],
    Field(fail_fast=True, max_length=MAX_PARTS),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ThinkingBlock(_BlockFields):
    type: Literal["thinking"]
    thinking: StrictStr


class ToolUseBlock(_BlockFields):
    type: Literal["tool_use"]
    id: StrictStr
    name: StrictStr
    input: dict[str, Any]


class ToolResultBlock(_BlockFields):
    type: Literal["tool_result"]
    tool_use_id: StrictStr
    content: TextBlocks | None = None
    is_error: StrictBool | None = None


Block: TypeAlias = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]


class MessageParam(NestedFields):
    place = "messages"
    no_effect = frozenset({"id", "model", "type", "usage", "stop_reason", "stop_sequence"})  # of an earlier answer

    role: Literal["user", "assistant", "system"]
    content: Annotated[
        list[Block],
        Field(fail_fast=True, max_length=MAX_PARTS),
        BeforeValidator(_as_blocks, json_schema_input_type=str | list[Block]),
    ]


class MessagesTool(NestedFields):
    place = "tools"
    no_effect = frozenset(
        {"cache_control", "eager_input_streaming", "defer_loading", "allowed_callers", "input_examples"}
    )

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=LONG_TOOL_NAME_PATTERN, strict=True)]
    description: StrictStr | None = None
    input_schema: dict[str, Any]
    strict: StrictBool | None = None


CheckedTool: TypeAlias = Annotated[
    MessagesTool, check_tool("custom", {"defer_loading": False, "allowed_callers": ["direct"], "input_examples": []})
]


class MessagesToolChoice(NestedFields):
    place = "tool_choice"

    type: Literal["auto", "any", "tool", "none"]
    name: StrictStr | None = None
    disable_parallel_tool_use: StrictBool | None = None


class ThinkingConfig(NestedFields):
    place = "thinking"

    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: StrictInt | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonOutputFormat(NestedFields):
    place = "output_config.format"
    no_effect = frozenset({"name", "description", "strict"})

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(NestedFields):
    place = "output_config"
    inert_values = {"task_budget": ()}

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None


class MessagesPrompt(BaseModel):
    """The fields that determine the prompt."""

    messages: Annotated[list[MessageParam], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    system: TextBlocks | None = None
    tools: Annotated[list[CheckedTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessagesRequest(SamplingRequest, MessagesPrompt):
    max_tokens: MaxTokens
    stop_sequences: StopStrings | None = None
    # These have no effect.
    metadata: dict[str, Any] | None = None
    service_tier: StrictStr | None = None
    cache_control: Any = None
    inference_geo: StrictStr | None = None
    user_profile_id: StrictStr | None = None
    workspace_id: StrictStr | None = None

    @property
    def max_new_tokens(self) -> int:
        return self.max_tokens


class CountTokensRequest(MessagesPrompt):
    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = None


def messages_error_body(error: ApiError) -> dict[str, Any]:
    """Anthropic's error body, whose message contains `param`. Clients recognise the words "prompt is too long"."""
    types = {
        401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"
    }  # fmt: skip
    error_type = types.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    start = "prompt is too long: " if error.code == CONTEXT_LENGTH_EXCEEDED else ""
    place = f" (in {error.param})" if error.param and error.param not in error.message else ""
    return {"type": "error", "error": {"type": error_type, "message": f"{start}{error.message}{place}"}}
