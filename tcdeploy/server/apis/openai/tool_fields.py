"""Schemas of the request fields `tools` and `tool_choice`, and a check of tools for all APIs. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, StrictStr
from pydantic_core import PydanticCustomError

from tcdeploy.server.apis.openai.nested_fields import UNSUPPORTED_PART, NestedFields, check_kind

MAX_TOOLS = 128  # OpenAI's limit
LONG_TOOL_NAME_PATTERN = r"^[a-zA-Z0-9_.-]{1,128}$"  # of the other APIs


def check_tool(kind: str, inert_values: Mapping[str, Any]) -> BeforeValidator:
    """A validator that refuses tools of another type than `kind`, and options with other values than the inert ones."""

    def check(tool: Any) -> Any:
        if isinstance(tool, dict):
            check_kind(tool.get("type"), (kind,), {}, "tools", "")
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
