"""Schemas of the request fields `tools` and `tool_choice`. Does not import torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from tcdeploy.server.apis.openai.nested_fields import NestedFields

MAX_TOOLS = 128  # OpenAI's limit


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
