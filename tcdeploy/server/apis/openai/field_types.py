"""Types of request fields with their limits, objects inside of a request, and the schemas of `tools` and `tool_choice`.

Each limit is written once: here, in the model of a request or, for sampling parameters, in the engine. pydantic checks
it, request_parsing.py makes the error message, and /openapi.json is derived from the models. Limits that depend on the
served model, and combinations of fields, are in validation.py. A list fails at its first invalid item, because a body
may hold thousands of items.

Unknown fields inside of a request are treated like those at the top level (unsupported_fields.py): one that would
change the answer is refused by name, unless its value has no effect; any other is accepted, logged and counted once.
pydantic drops unknown fields, so they are examined before the validation, and when pydantic validates their object,
because a walk through a whole request would block the event loop. Does not import torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationInfo,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from tcdeploy.engine.schedule.sequence import LOGIT_BIAS, MAX_LOGIT_BIASES, PARAM_CHECKS, ParamCheck
from tcdeploy.server.http.json_steps import Integers
from tcdeploy.server.output.structured.bad_words import MAX_BAD_WORDS

MAX_PROMPTS = 1024
MAX_TOKEN_IDS = 1 << 20  # in one list
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1000  # of one string; each token compares its beginnings with the end of the output
MAX_STOP_TOKEN_IDS = 128
TOKEN_ID_KEY_PATTERN = r"^[0-9]{1,10}$"
MAX_TOOLS = 128  # OpenAI's limit
LONG_TOOL_NAME_PATTERN = r"^[a-zA-Z0-9_.-]{1,128}$"  # of the other APIs
UNSUPPORTED_FIELD = "unsupported_field"  # type of the validation error
# Type of the validation error for an unsupported part or item. `path` in its context is appended to the location of the
# error.
UNSUPPORTED_PART = "unsupported_part"
MAX_NAMES = 100  # of unknown fields that are collected in one request


def limits_of(name: str) -> Any:
    """The engine's limits of a sampling parameter."""
    return _bounds(PARAM_CHECKS[name])


def _bounds(check: ParamCheck) -> Any:
    return Field(ge=check.ge, gt=check.gt, le=check.le, lt=check.lt)


def at_most(limit: int, noun: str) -> BeforeValidator:
    """A validator of the number of items of a mapping. pydantic's `max_length` would validate all items first."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("too_long", f"there are {len(value)} {noun}; the limit is {limit}")
        return value

    return BeforeValidator(check)


def _keep_integers(value: Any, validate: Callable[[Any], Any]) -> Any:
    """Accept a list of integers as it is, because the parser of large bodies has checked its items."""
    return value if type(value) is Integers else validate(value)


Number: TypeAlias = Annotated[StrictFloat, Field(allow_inf_nan=False)]  # integers too
MaxTokens: TypeAlias = Annotated[StrictInt, limits_of("max_tokens")]
NumLogprobs: TypeAlias = Annotated[StrictInt, limits_of("logprobs")]
# A name in /openapi.json, which openapi.py completes by the size of the vocabulary. The range of ids is checked where
# that size is known; a limit here would take 15 times as long as the type.
TokenId = TypeAliasType("TokenId", Annotated[StrictInt, WithJsonSchema({"type": "integer", "minimum": 0})])
TokenIds: TypeAlias = Annotated[
    list[TokenId], Field(fail_fast=True, max_length=MAX_TOKEN_IDS), WrapValidator(_keep_integers)
]
StopTokenIds: TypeAlias = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_TOKEN_IDS)]
LogitBias: TypeAlias = Annotated[
    dict[
        Annotated[str, WithJsonSchema({"type": "string", "pattern": TOKEN_ID_KEY_PATTERN})],
        Annotated[Number, _bounds(LOGIT_BIAS)],
    ],
    Field(max_length=MAX_LOGIT_BIASES, json_schema_extra={"additionalProperties": False}),
    at_most(MAX_LOGIT_BIASES, "logit biases"),
]
PromptIds: TypeAlias = Annotated[
    list[TokenId], Field(fail_fast=True, min_length=1, max_length=MAX_TOKEN_IDS), WrapValidator(_keep_integers)
]
PromptTexts: TypeAlias = Annotated[list[StrictStr], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
PromptIdLists: TypeAlias = Annotated[list[PromptIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
StopString: TypeAlias = Annotated[StrictStr, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings: TypeAlias = Annotated[list[StopString], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)]
Stop: TypeAlias = Annotated[
    StopStrings,
    BeforeValidator(
        lambda value: [value] if isinstance(value, str) else value, json_schema_input_type=StopString | StopStrings
    ),
]
BadWords: TypeAlias = Annotated[
    list[Annotated[StrictStr, Field(min_length=1)]], Field(fail_fast=True, max_length=MAX_BAD_WORDS)
]


class NestedFields(BaseModel):
    """An object inside of a request. The validation context, if there is one, is a set that collects unknown names."""

    place: ClassVar[str] = ""  # of the object in a request, for the names of unknown fields
    no_effect: ClassVar[frozenset[str]] = frozenset()  # known fields that change nothing; they are not counted
    inert_values: ClassVar[Mapping[str, tuple[Any, ...]]] = {}  # unsupported field -> values without effect; also null
    alternatives: ClassVar[Mapping[str, str]] = {}  # unsupported field -> what to send instead

    @model_validator(mode="before")
    @classmethod
    def _check_unknown_fields(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, dict) and not value.keys() <= (known := _known_names(cls)):
            for name in value.keys() - known:
                cls._check_unknown_field(name, value[name], info.context)
        return value

    @classmethod
    def _check_unknown_field(cls, name: str, value: Any, unknown_names: set[str] | None) -> None:
        if name not in cls.inert_values:
            if unknown_names is not None and cls.place and len(unknown_names) < MAX_NAMES:
                unknown_names.add(f"{cls.place}.{name}")
        elif value is not None and value not in cls.inert_values[name]:
            alternative = f"; {cls.alternatives[name]}" if name in cls.alternatives else ""
            context = {"name": name, "alternative": alternative}
            raise PydanticCustomError(UNSUPPORTED_FIELD, "{name} is not supported{alternative}", context)


@functools.cache
def _known_names(model: type[NestedFields]) -> frozenset[str]:
    return model.no_effect.union(info.alias or name for name, info in model.model_fields.items())


def check_kind(item: Any, supported: tuple[str, ...], names: dict[str, str], noun: str, path: str) -> None:
    """Raise an error for an item of a `type` that is not in `supported`. names: plural nouns for known types."""
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(kind, str) or kind in supported:
        return
    name = names.get(kind, f"{noun} of the type {kind[:40]!r}".replace("{", "").replace("}", ""))
    raise PydanticCustomError(UNSUPPORTED_PART, f"{name} are not supported by this server", {"path": path})


def check_tool(kind: str, inert_values: Mapping[str, Any]) -> BeforeValidator:
    """A validator that refuses tools of another type than `kind`, and options with other values than the inert ones."""

    def check(tool: Any) -> Any:
        if isinstance(tool, dict):
            check_kind(tool, (kind,), {}, "tools", "")
            for name, inert in inert_values.items():
                if tool.get(name) not in (None, inert):
                    raise PydanticCustomError(UNSUPPORTED_PART, f"{name} is not supported", {"path": f".{name}"})
        return tool

    return BeforeValidator(check)


class Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$", strict=True)]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(NestedFields):
    place = "tools"
    no_effect = frozenset({"cache_control"})
    inert_values = {"defer_loading": (False,), "allowed_callers": (["direct"],), "custom": ()}

    type: Literal["function"]
    function: Function


class NamedFunction(NestedFields):
    place = "tool_choice.function"

    name: StrictStr


class _ToolChoiceFields(NestedFields):
    place = "tool_choice"
    inert_values = {"disable_parallel_tool_use": (False,), "mode": ()}
    alternatives = {"disable_parallel_tool_use": "use parallel_tool_calls"}


class NamedToolChoice(_ToolChoiceFields):
    type: Literal["function"]
    function: NamedFunction


class AllowedTool(NestedFields):
    place = "tool_choice.allowed_tools.tools"

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(NestedFields):
    place = "tool_choice.allowed_tools"

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(fail_fast=True, min_length=1)]


class AllowedToolsChoice(_ToolChoiceFields):
    """OpenAI's `tool_choice` that restricts a request to some of its tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice: TypeAlias = (
    Literal["none", "auto", "required"] | Annotated[NamedToolChoice | AllowedToolsChoice, Field(discriminator="type")]
)
Tools: TypeAlias = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]


def dump_tools(tools: list[Tool] | None) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_unset=True) for tool in tools or []]
