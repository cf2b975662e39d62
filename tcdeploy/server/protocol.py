"""OpenAI's shapes as this server takes and gives them, and the errors that it answers with. No torch.

Sources: OpenAI's API reference (completions, chat completions, models), and vLLM's protocol for what is beyond it
(top_k, min_p, repetition_penalty, ignore_eos, min_tokens, continuous_usage_stats). Types are strict: `"5"` and `true`
are no numbers. A field that nobody knows is let through, so that clients with fields of their own work. What a request
of the right shape may ask for is in limits.py. A list ends at its first wrong item: a body may hold a million.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError
from pydantic_core import from_json

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own, of /v1/completions
MAX_PROMPTS = 1024
MAX_MESSAGES = 8192


class ApiError(Exception):
    """An answer that is an error: its HTTP status, and OpenAI's body."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.retry_after = status, message, param, code, retry_after

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def kind(self) -> str:
        kinds = {401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}
        return kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


def bad_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


Number = Annotated[StrictInt | StrictFloat, Field()]
TokenIds: TypeAlias = Annotated[list[StrictInt], Field(fail_fast=True, max_length=1 << 20)]
StringList: TypeAlias = Annotated[list[StrictStr], Field(fail_fast=True, max_length=MAX_PROMPTS)]
TokenIdLists: TypeAlias = Annotated[list[TokenIds], Field(fail_fast=True, max_length=MAX_PROMPTS)]
RequestT = TypeVar("RequestT", bound=BaseModel)


class StreamOptions(BaseModel):
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class TextFormat(BaseModel):
    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    type: Literal["json_object"]


class JsonSchema(BaseModel):
    """The answer is always held to its schema, whatever `strict` says."""

    name: StrictStr | None = None
    description: StrictStr | None = None
    strict: StrictBool | None = None
    json_schema: dict[str, Any] = Field(alias="schema")


class JsonSchemaFormat(BaseModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class GenerationRequest(BaseModel):
    """What both kinds of completion take."""

    model_config = ConfigDict(extra="allow")

    model: StrictStr | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    n: StrictInt | None = None
    stop: StrictStr | StringList | None = None
    stop_token_ids: TokenIds | None = None
    seed: StrictInt | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    max_tokens: StrictInt | None = None
    min_tokens: StrictInt | None = None
    ignore_eos: StrictBool | None = None
    skip_special_tokens: StrictBool | None = None
    response_format: ResponseFormat | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    user: StrictStr | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        given = [] if self.stop is None else [self.stop] if isinstance(self.stop, str) else self.stop
        return tuple(given)

    @property
    def output_schema(self) -> dict[str, Any] | None:
        """The JSON schema that an answer must satisfy; None: any text will do."""
        if isinstance(self.response_format, JsonSchemaFormat):
            return self.response_format.json_schema.json_schema
        return {"type": "object"} if isinstance(self.response_format, JsonObjectFormat) else None

    @property
    def constraint_field(self) -> str:
        """The field that demands a form of the answer; "": none does."""
        return "response_format" if self.output_schema is not None else ""

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives beside the chosen token; None: no log-probabilities at all."""
        raise NotImplementedError

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens


class CompletionRequest(GenerationRequest):
    # What fits first is taken: else a long prompt is tried as everything, token by token.
    prompt: StrictStr | TokenIds | StringList | TokenIdLists = Field(union_mode="left_to_right")
    logprobs: StrictInt | None = None
    echo: StrictBool | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def max_new_tokens(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry for each prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class TextPart(BaseModel):
    type: Literal["text"]
    text: StrictStr


class FunctionCall(BaseModel):
    name: StrictStr
    arguments: StrictStr  # JSON


class ToolCall(BaseModel):
    """A call that an assistant made earlier in the chat."""

    id: StrictStr | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Templates expect the arguments as an object. Raises ApiError where they are none."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise bad_request(f"the arguments of a call of {self.function.name:.80} are no JSON object", "messages")
        named = {} if self.id is None else {"id": self.id}
        return {**named, "type": self.type, "function": {"name": self.function.name, "arguments": arguments}}


class Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$", strict=True)]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(BaseModel):
    type: Literal["function"]
    function: Function


class NamedFunction(BaseModel):
    name: StrictStr


class NamedToolChoice(BaseModel):
    type: Literal["function"]
    function: NamedFunction


class Message(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: StrictStr
    content: StrictStr | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: StrictStr | None = None

    def for_template(self) -> dict[str, Any]:
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or [])
        made = {**(self.model_extra or {}), "role": self.role, "content": content}
        if self.tool_calls:
            made["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            made["tool_call_id"] = self.tool_call_id
        return made


Tools: TypeAlias = Annotated[list[Tool], Field(fail_fast=True)]
Messages: TypeAlias = Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class ChatRequest(GenerationRequest):
    messages: Messages
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = None
    top_logprobs: StrictInt | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: StrictBool | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None  # false: of several calls, the first is told

    @property
    def usable_tools(self) -> list[dict[str, Any]]:
        """As they were sent."""
        return [] if self.tool_choice == "none" else dump_tools(self.tools)

    @property
    def forced_tools(self) -> list[dict[str, Any]]:
        """One of these must be called; empty: none need be."""
        if isinstance(self.tool_choice, NamedToolChoice):
            name = self.tool_choice.function.name
            return [tool for tool in self.usable_tools if tool["function"]["name"] == name]
        return self.usable_tools if self.tool_choice == "required" else []

    @property
    def allows_multiple_calls(self) -> bool:
        return self.tool_choice == "required" and self.parallel_tool_calls is not False

    @property
    def constraint_field(self) -> str:
        return super().constraint_field or ("tool_choice" if self.forced_tools else "")

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class TokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    prompt: StrictStr | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool | None = None


class DetokenizeRequest(BaseModel):
    model_config = ConfigDict(extra="allow")

    tokens: TokenIds


def dump_tools(tools: list[Tool] | None) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_unset=True) for tool in tools or []]


def parse(kind: type[RequestT], body: bytes) -> RequestT:
    """A request from JSON. Raises ApiError for what is no JSON, or not of this shape.

    In two steps: in one, pydantic makes its input anew for every error, and a million lists take 1.0 s instead of 0.3.
    """
    try:
        return kind.model_validate(from_json(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise bad_request(
            f"{where or 'the body'}: {first['msg']}", str(first["loc"][0]) if first["loc"] else None
        ) from None
    except ValueError as error:
        raise bad_request(f"the body is no JSON: {error}", None, "invalid_json") from None
