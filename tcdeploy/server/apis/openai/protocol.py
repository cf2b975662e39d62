"""Request schemas of OpenAI's API with vLLM's extensions, and the error format. Does not import torch.

Sources: OpenAI's API reference (completions, chat completions, models) and vLLM's protocol for the extensions. Types
are strict: `"5"` and `true` are not numbers. Unknown fields are accepted, so that clients with other extensions work.
The schemas contain the limits of the fields (field_types.py); validation.py checks combinations.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, StrictBool, StrictInt, StrictStr
from pydantic_core import PydanticCustomError

from tcdeploy.engine.schedule.sequence import MAX_TOP_K
from tcdeploy.server.apis.openai.field_types import (
    UNSUPPORTED_PART,
    AllowedToolsChoice,
    BadWords,
    LogitBias,
    MaxTokens,
    NamedToolChoice,
    NestedFields,
    Number,
    NumLogprobs,
    PromptIdLists,
    PromptIds,
    PromptTexts,
    Stop,
    StopTokenIds,
    TokenIds,
    ToolChoice,
    Tools,
    dump_tools,
    limits_of,
)
from tcdeploy.server.output.structured.output_constraint import ConstraintFields

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_CHOICES = 128  # n
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # text parts or tool calls in one message
PART_SEPARATOR = "\n"  # between the text parts of one message, as in vLLM
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
MEDIA = {  # content parts of OpenAI's and vLLM's APIs, by type
    "image_url": "images", "input_image": "images", "image": "images", "image_pil": "images", "image_embeds": "images",
    "input_audio": "audio inputs", "audio_url": "audio inputs", "audio": "audio inputs",
    "video_url": "videos", "input_video": "videos", "video": "videos", "file": "files", "input_file": "files",
}  # fmt: skip


class ApiError(Exception):
    """An error response: the HTTP status, headers and OpenAI's error body. `retry_after` is in seconds."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None,
        retry_after: int | None = None, headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after
        self.headers = dict(headers or {}) | ({} if retry_after is None else {"retry-after": str(retry_after)})

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}}

    @property
    def error_type(self) -> str:
        types = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
        return types.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


def bad_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


class StreamOptions(NestedFields):
    place = "stream_options"
    inert_values = {"include_obfuscation": (False,)}

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


class SamplingRequest(BaseModel):
    """Fields that all APIs share: the model, its sampling parameters, and whether tokens are streamed."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = None
    temperature: Annotated[Number, limits_of("temperature")] | None = None
    top_p: Annotated[Number, limits_of("top_p")] | None = None
    top_k: Annotated[StrictInt, Field(ge=-1, le=MAX_TOP_K)] | None = None  # -1 and 0: all tokens
    min_p: Annotated[Number, limits_of("min_p")] | None = None
    stop_token_ids: StopTokenIds | None = None
    seed: Annotated[StrictInt, limits_of("seed")] | None = None
    presence_penalty: Annotated[Number, limits_of("presence_penalty")] | None = None
    frequency_penalty: Annotated[Number, limits_of("frequency_penalty")] | None = None
    repetition_penalty: Annotated[Number, limits_of("repetition_penalty")] | None = None
    logit_bias: LogitBias | None = None
    min_tokens: Annotated[StrictInt, limits_of("min_tokens")] | None = None
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    bad_words: BadWords | None = None
    stream: StrictBool | None = None
    _unknown_nested: frozenset[str] = PrivateAttr(default=frozenset())  # names of unknown fields inside of others

    @property
    def max_new_tokens(self) -> int | None:
        """The maximum number of tokens of a choice; None if the request sets no limit."""
        raise NotImplementedError


class GenerationRequest(SamplingRequest, ConstraintFields):
    """Fields that completions and chat completions share."""

    n: Annotated[StrictInt, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop | None = None
    max_tokens: MaxTokens | None = None
    # -1: as many as fit
    truncate_prompt_tokens: Annotated[StrictInt, Field(ge=1)] | Literal[-1] | None = None
    add_special_tokens: StrictBool | None = None  # default: true for completions, false for chats
    return_token_ids: StrictBool | None = None
    prompt_logprobs: NumLogprobs | None = None
    stream_options: StreamOptions | None = None
    user: StrictStr | None = None
    _lowers_max_tokens: bool = PrivateAttr(default=False)  # if it exceeds the context; else the request is rejected

    @property
    def num_choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def constraint_field(self) -> str:
        """Name of the field that constrains the output, or ""."""
        return self.output_constraint.field if self.output_constraint else ""

    @property
    def num_logprobs(self) -> int | None:
        """Number of alternatives per token, besides the sampled one; None if no log-probabilities are returned."""
        raise NotImplementedError

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def only_scores_prompt(self) -> bool:
        """Whether the response has the prompt and its log-probabilities, and no new tokens."""
        return False


class CompletionRequest(GenerationRequest):
    # left_to_right: smart mode would validate a long prompt against every member of the union.
    prompt: StrictStr | PromptIds | PromptTexts | PromptIdLists = Field(union_mode="left_to_right")
    max_tokens: Annotated[StrictInt, Field(ge=0)] | None = None  # 0 only scores the prompt, and requires `echo`
    logprobs: NumLogprobs | None = None
    echo: StrictBool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def only_scores_prompt(self) -> bool:
        return self.max_tokens == 0 and self.echo is True

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts of the request, as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class TextPart(NestedFields):
    """A text. The other types are those of the Responses API, which clients send in chats too."""

    place = "messages.content"
    no_effect = frozenset({"cache_control", "annotations"})

    type: Literal["text", "input_text", "output_text"]
    text: StrictStr


class RefusalPart(NestedFields):
    place = "messages.content"
    no_effect = frozenset({"cache_control"})

    type: Literal["refusal"]
    text: StrictStr = Field(alias="refusal")


class FunctionCall(NestedFields):
    place = "messages.tool_calls.function"

    name: StrictStr
    arguments: StrictStr  # JSON; calls that are built from the Messages API have an object instead


class ToolCall(NestedFields):
    """A tool call of an earlier assistant message."""

    place = "messages.tool_calls"
    no_effect = frozenset({"index"})

    id: StrictStr | None = None
    type: Literal["function"] | None = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        call_id = {} if self.id is None else {"id": self.id}
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {**call_id, "type": "function", "function": function}


def _check_parts(content: Any) -> Any:
    """Raise an error for a part other than text. pydantic would first name another error."""
    for index, part in enumerate(content[:MAX_PARTS] if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in TEXT_PARTS:
            name = MEDIA.get(kind)
            raise PydanticCustomError(
                UNSUPPORTED_PART,
                f"{name} are not supported by this server"
                if name
                else f"content parts of this type are not supported by this server, only {', '.join(TEXT_PARTS)}",
                {"path": f"[{index}]"},
            )
    return content


Part: TypeAlias = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Parts: TypeAlias = Annotated[list[Part], Field(fail_fast=True, max_length=MAX_PARTS)]


class Message(NestedFields):
    """A message. The chat template gets its unknown fields too, so they are not counted."""

    model_config = ConfigDict(extra="allow")
    inert_values = {"audio": (), "prefix": (False,), "partial": (False,), "images": ([],), "files": ([],)}
    alternatives = dict.fromkeys(("prefix", "partial"), "use continue_final_message")

    role: StrictStr
    content: Annotated[StrictStr | Parts | None, BeforeValidator(_check_parts)] = None
    refusal: StrictStr | None = None  # OpenAI's API returns it instead of content
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    function_call: FunctionCall | None = None  # OpenAI's earlier form of a tool call
    tool_call_id: StrictStr | None = None

    @property
    def text(self) -> str:
        texts = [part.text for part in self.content] if isinstance(self.content, list) else [self.content]
        return PART_SEPARATOR.join(text for text in (*texts, self.refusal) if text)

    def for_template(self) -> dict[str, Any]:
        """The message with its content as text. text/template_form.py converts it to the template's form."""
        message = {**(self.model_extra or {}), "role": self.role, "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.function_call is not None:
            message["function_call"] = self.function_call.model_dump()
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Messages: TypeAlias = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class TemplateRequest(BaseModel):
    """Fields that the chat template depends on."""

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool | None = None  # default: true, unless the final message is continued
    continue_final_message: StrictBool | None = None
    reasoning_effort: ReasoningEffort | None = None


class ChatRequest(GenerationRequest, TemplateRequest):
    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    logprobs: StrictBool | None = None
    top_logprobs: NumLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None  # false: only the first call is returned

    @functools.cached_property
    def usable_tools(self) -> list[dict[str, Any]]:
        """The tools that the model may call, as they were sent. Only these are in the prompt."""
        tools = [] if self.tool_choice == "none" else dump_tools(self.tools)
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return [tool for tool in tools if tool["function"]["name"] in self.chosen_names]
        return tools

    @functools.cached_property
    def forced_tools(self) -> list[dict[str, Any]]:
        """The tools of which one must be called; empty if no call is required."""
        if isinstance(self.tool_choice, NamedToolChoice):
            return [tool for tool in self.usable_tools if tool["function"]["name"] in self.chosen_names]
        return self.usable_tools if self.tool_mode == "required" else []

    @property
    def chosen_names(self) -> set[str]:
        """The functions that `tool_choice` names."""
        if isinstance(self.tool_choice, NamedToolChoice):
            return {self.tool_choice.function.name}
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return {tool.function.name for tool in self.tool_choice.allowed_tools.tools}
        return set()

    @property
    def tool_mode(self) -> str | None:
        """`tool_choice`, or its mode if it restricts the tools. None if it is omitted or names a function."""
        if isinstance(self.tool_choice, AllowedToolsChoice):
            return self.tool_choice.allowed_tools.mode
        return self.tool_choice if isinstance(self.tool_choice, str) else None

    @property
    def allows_multiple_calls(self) -> bool:
        return self.tool_mode == "required" and self.parallel_tool_calls is not False

    @property
    def constraint_field(self) -> str:
        return super().constraint_field or ("tool_choice" if self.forced_tools else "")

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(TemplateRequest):
    model_config = ConfigDict(extra="allow")

    prompt: StrictStr | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: StrictBool | None = None  # default: true for a prompt, false for messages


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    tokens: TokenIds
