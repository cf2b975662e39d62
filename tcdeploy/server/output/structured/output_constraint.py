"""Request fields that constrain the output: OpenAI's `response_format`, and vLLM's `structured_outputs` and guided_*.

All of them become an `OutputConstraint`: a kind, its value, and the field for error messages. structured_output.py
compiles it. A request may contain one constraint; validation.py rejects more. Does not import torch.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from tcdeploy.server.apis.openai.field_types import NestedFields

ConstraintKind: TypeAlias = Literal["json", "regex", "choice", "grammar"]
KINDS: tuple[ConstraintKind, ...] = get_args(ConstraintKind)
MAX_ALTERNATIVES = 1024  # alternatives of one constraint
Choices: TypeAlias = Annotated[list[StrictStr], Field(fail_fast=True, max_length=MAX_ALTERNATIVES)]
# Unsupported keys of `structured_outputs` -> the value that has no effect and is accepted, as is null.
UNSUPPORTED_KEYS = {
    "structural_tag": None, "disable_any_whitespace": False, "disable_additional_properties": False,
    "whitespace_pattern": None,
}  # fmt: skip


class OutputConstraint(NamedTuple):
    """`value`: for json, a schema as a dict or as JSON text; for choice, a list of strings; otherwise a string."""

    kind: ConstraintKind
    value: Any
    field: str  # name of the request field


class _Format(NestedFields):
    """A response format. `inert_values` has the fields of other servers, and those of other types of formats."""

    place = "response_format"
    inert_values = dict.fromkeys(
        ("schema", "json_schema", "response_schema", "value", "regex", "pattern", "grammar", "format"), ()
    )
    alternatives = dict.fromkeys(
        ("schema", "json_schema", "response_schema", "value"), "use the type json_schema with json_schema.schema"
    ) | dict.fromkeys(("regex", "pattern", "grammar"), "use structured_outputs")


class TextFormat(_Format):
    type: Literal["text"]


class JsonObjectFormat(_Format):
    """With `schema`, as in llama.cpp's and Together's APIs, the output follows that schema."""

    type: Literal["json_object"]
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class JsonSchema(NestedFields):
    """The output always follows the schema, whatever the value of `strict`."""

    place = "response_format.json_schema"

    name: StrictStr | None = None
    description: StrictStr | None = None
    strict: StrictBool | None = None
    json_schema: dict[str, Any] = Field(alias="schema")


class JsonSchemaFormat(_Format):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(BaseModel):
    """vLLM's field. Other keys are kept, so that they can be rejected by name."""

    model_config = ConfigDict(extra="allow")

    json_schema: dict[str, Any] | StrictStr | None = Field(default=None, alias="json")
    regex: StrictStr | None = None
    choice: Choices | None = None
    grammar: StrictStr | None = None
    json_object: StrictBool | None = None

    def constraints(self) -> list[OutputConstraint]:
        values = zip(KINDS, (self.json_schema, self.regex, self.choice, self.grammar), strict=True)
        present = [(kind, value) for kind, value in values if value is not None]
        if self.json_object:
            present.append(("json", {"type": "object"}))
        return [OutputConstraint(kind, value, "structured_outputs") for kind, value in present]

    def unsupported_key(self) -> str:
        """The first key that would change the output and is not supported, or ""."""
        extra = self.model_extra or {}
        inert = (name for name, value in extra.items() if value is None or value == UNSUPPORTED_KEYS.get(name, ...))
        return next(iter(extra.keys() - set(inert)), "")


class ConstraintFields(BaseModel):
    """Request fields that constrain the output. vLLM's older guided_* fields have no effect if they are empty."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | StrictStr | None = None
    guided_regex: StrictStr | None = None
    guided_choice: Choices | None = None
    guided_grammar: StrictStr | None = None

    @cached_property
    def output_constraints(self) -> list[OutputConstraint]:
        """All constraints, of which a valid request has at most one."""
        constraints = []
        match self.response_format:
            case JsonSchemaFormat(json_schema=JsonSchema(json_schema=schema)) | JsonObjectFormat(json_schema=schema):
                schema = {"type": "object"} if schema is None else schema
                constraints.append(OutputConstraint("json", schema, "response_format"))
        if self.structured_outputs is not None:
            constraints += self.structured_outputs.constraints()
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        values = zip(KINDS, guided, strict=True)
        return constraints + [OutputConstraint(kind, value, f"guided_{kind}") for kind, value in values if value]

    @property
    def output_constraint(self) -> OutputConstraint | None:
        return self.output_constraints[0] if self.output_constraints else None
