"""Types of request fields with their limits.

Each limit is written once: here, in the model of a request or, for sampling parameters, in the engine. pydantic checks
it, request_parsing.py makes the error message, and /openapi.json is derived from the models. Limits that depend on the
served model, and combinations of fields, are in validation.py. A list fails at its first invalid item, because a body
may hold thousands of items. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field, StrictFloat, StrictInt, StrictStr, WithJsonSchema, WrapValidator
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


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Number: TypeAlias = Annotated[StrictFloat, Field(allow_inf_nan=False)]  # integers too
MaxTokens: TypeAlias = Annotated[StrictInt, limits_of("max_new_tokens")]
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
    StopStrings, BeforeValidator(_as_list, json_schema_input_type=StopString | StopStrings)
]  # one string becomes a list
BadWords: TypeAlias = Annotated[
    list[Annotated[StrictStr, Field(min_length=1)]], Field(fail_fast=True, max_length=MAX_BAD_WORDS)
]
