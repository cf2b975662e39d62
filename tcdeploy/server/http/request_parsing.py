"""Parses and validates JSON bodies without blocking the event loop. Does not import torch.

A small body is parsed in one call, which takes at most 5 ms for any content. A large body is parsed in steps
(json_steps.py), one large body at a time, and its messages are validated in slices. Other tasks run in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, from_json

from tcdeploy.server.apis.openai.field_types import UNSUPPORTED_FIELD, UNSUPPORTED_PART
from tcdeploy.server.apis.openai.protocol import MAX_MESSAGES, MEDIA, ApiError, SamplingRequest, bad_request
from tcdeploy.server.apis.openai.validation import CONTEXT_LENGTH_EXCEEDED, context_length_message
from tcdeploy.server.http.json_steps import JsonLimitError, JsonLimits, JsonSteps, TooLongError

SMALL_BODY_BYTES = 16 << 10
SLICE_WEIGHT = 256  # messages and parts that are validated in one call, which takes about 1 ms
MAX_FIELDS = 256  # top-level fields of a body
MAX_PATH_CHARS, MAX_MESSAGE_CHARS, MAX_VALUE_CHARS = 200, 400, 80  # of path, reason and value in an error
EXPECTED = "Input should be "  # the beginning of pydantic's messages about a value
UNSPECIFIC_ERRORS = ("_type", "literal_error")  # endings of pydantic's types of errors: it is another type of a union
PROMPT_LISTS = ("messages", "input")  # fields that are lists of messages, and are validated in slices
# Keys of a part that contain media, whose value may exceed the limit of texts: the types of parts, which are also keys
# in vLLM's API, and the keys of Anthropic's Messages and OpenAI's Responses API.
MEDIA_KEYS = {**MEDIA, "source": "images and documents", "file_data": "files"}
Location: TypeAlias = tuple[int | str, ...]
RequestT = TypeVar("RequestT", bound=BaseModel)


def parse(request_type: type[RequestT], body: bytes | bytearray) -> RequestT:
    """Parse and validate a small body. Raises ApiError 400."""
    try:
        return _validate(request_type, from_json(body), set())
    except ValueError as error:
        raise _json_error(str(error)) from None


class LargeBodyParser:
    """Parses one body at a time, in steps, so that other tasks get their share of the event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def parse(self, request_type: type[RequestT], body: bytes | bytearray, limits: JsonLimits) -> RequestT:
        """Parse and validate a large body. Raises ApiError 400."""
        async with self._lock:
            with contextlib.ExitStack() as stack:
                if gc.isenabled():  # each collection would visit the body's containers, and JSON has no cycles
                    gc.disable()
                    stack.callback(gc.enable)
                fields = await _parse_in_steps(request_type, body, limits)
            unknown_names: set[str] = set()
            for name in PROMPT_LISTS:
                if isinstance(fields, dict) and name in request_type.model_fields:
                    await _validate_list(request_type, fields, name, unknown_names)
        return _validate(request_type, fields, unknown_names)


async def _parse_in_steps(request_type: type[BaseModel], body: bytes | bytearray, limits: JsonLimits) -> Any:
    steps = JsonSteps(body, limits)
    try:
        while not steps.step():
            await asyncio.sleep(0)
    except TooLongError as error:
        raise _too_long(request_type, error, limits) from None
    except JsonLimitError as error:
        raise bad_request(error.message, error.field and error.field[:MAX_PATH_CHARS]) from None
    except ValueError as error:
        raise _json_error(str(error)) from None
    return steps.value


def _too_long(request_type: type[BaseModel], error: TooLongError, limits: JsonLimits) -> ApiError:
    """The error for a text (or image) or a list of token ids, usually of a prompt, that is too long to be parsed."""
    match error.location:
        case (str() as field, int() as number, "content", int(index), *keys) if field in PROMPT_LISTS:
            if kind := next((MEDIA_KEYS[key] for key in keys if key in MEDIA_KEYS), None):
                location = (field, number, "content")
                return _unsupported_part(location, f"[{index}]", f"{kind} are not supported by this server")
    is_prompt = error.field in (*PROMPT_LISTS, "prompt") and issubclass(request_type, SamplingRequest)
    if not is_prompt or error.field is None or limits.context is None:
        return bad_request(error.message, error.field and error.field[:MAX_PATH_CHARS])
    message = context_length_message(limits.context, error.field, limits.integers + 1, 0, is_minimum=True)
    return bad_request(message, error.field, CONTEXT_LENGTH_EXCEEDED)


def _unsupported_part(location: Sequence[str | int], path: str, reason: str) -> ApiError:
    """The error for an unsupported part of a message, or another unsupported item, at `location` + `path`."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    place = ".".join(map(str, location))
    return bad_request(f"{place}: {reason}", f"{''.join(steps).removeprefix('.')}{path}"[:MAX_PATH_CHARS])


async def _validate_list(
    request_type: type[BaseModel], fields: dict[str, Any], name: str, unknown_names: set[str]
) -> None:
    """Validate a list of messages or items in slices, in place. pydantic does not validate the results again."""
    messages = fields.get(name)
    if not isinstance(messages, list) or len(messages) > MAX_MESSAGES:
        return  # a string, or `_validate` rejects it
    adapter = _list_adapter(request_type, name)
    validated: list[Any] = []
    for piece in _slices(messages):
        try:
            validated += adapter.validate_python(piece, context=unknown_names)
        except ValidationError as error:
            raise _validation_error(error, fields, (name, len(validated))) from None
        await asyncio.sleep(0)
    fields[name] = validated


@functools.cache
def _list_adapter(request_type: type[BaseModel], name: str) -> TypeAdapter[Any]:
    field = request_type.model_fields[name]
    annotated: Any = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    return TypeAdapter(annotated)


def _slices(messages: list[Any]) -> Iterator[list[Any]]:
    """Consecutive slices with at most SLICE_WEIGHT messages and parts, or with a single message."""
    start = weight = 0
    for index, message in enumerate(messages):
        lists = message.values() if isinstance(message, dict) else ()
        message_weight = 1 + sum(len(value) for value in lists if isinstance(value, list))
        if weight + message_weight > SLICE_WEIGHT and index > start:
            yield messages[start:index]
            start, weight = index, 0
        weight += message_weight
    yield messages[start:]


def _validate(request_type: type[RequestT], value: Any, unknown_names: set[str]) -> RequestT:
    """The request of a parsed body. `unknown_names`: unknown fields of messages that have been validated."""
    if isinstance(value, dict) and len(value) > MAX_FIELDS:
        raise bad_request(f"the body has {len(value)} fields; the limit is {MAX_FIELDS}", None)
    try:
        request = request_type.model_validate(value, context=unknown_names)
    except ValidationError as error:
        raise _validation_error(error, value) from None
    if isinstance(request, SamplingRequest):
        request._unknown_nested = frozenset(unknown_names)
    return request


def _validation_error(error: ValidationError, body: Any, list_offset: tuple[str, int] | None = None) -> ApiError:
    """The response for the first invalid or unsupported field. `list_offset`: if only some items of a list were
    validated, the name of its field and the index of the first item.
    """
    errors = error.errors(include_url=False)
    if list_offset is not None:
        for item in errors:
            index, *rest = item["loc"] or (0,)
            item["loc"] = (list_offset[0], list_offset[1] + int(index), *rest)
    main = next((item for item in errors if item["type"] == UNSUPPORTED_FIELD), None) or _main_error(errors)
    if main["type"] == UNSUPPORTED_PART:
        return _unsupported_part(main["loc"], main["ctx"]["path"], main["msg"])
    place = _place(body, main["loc"])
    alternatives = [item for item in errors if _place(body, item["loc"]) == place]  # of a union
    if main["type"] == "missing":
        place = (*place, main["loc"][-1])
    code = "unsupported_parameter" if main["type"] == UNSUPPORTED_FIELD else None
    param = str(place[0])[:MAX_PATH_CHARS] if place else None
    return bad_request(_error_message(main, alternatives, place), param, code)


def _main_error(errors: list[ErrorDetails]) -> ErrorDetails:
    """The most specific error of the first field. pydantic has errors for all types of a union."""
    in_field = [item for item in errors if item["loc"][:1] == errors[0]["loc"][:1]]
    return max(in_field, key=lambda item: (not item["type"].endswith(UNSPECIFIC_ERRORS), len(item["loc"])))


def _place(body: Any, location: Location) -> Location:
    """The keys and indices in `location`, without pydantic's names for the types of a union."""
    place, value = [], body
    for step in location:
        if isinstance(value, dict) and step in value or isinstance(value, list) and isinstance(step, int):
            place.append(step)
            value = value[step]  # type: ignore[index]
    return tuple(place)


def _error_message(error: ErrorDetails, alternatives: list[ErrorDetails], place: Location) -> str:
    """pydantic's message with the place and the value. `alternatives`: the errors for all types of a union."""
    if error["type"] == "string_too_short":
        return f"{_path(place[:-1] if isinstance(place[-1], int) else place)} contains an empty string"
    message = error["msg"][:MAX_MESSAGE_CHARS]
    if not message.startswith(EXPECTED):
        return f"{_path(place)}: {message}"
    expected = dict.fromkeys(_expected(item) for item in alternatives if item["msg"].startswith(EXPECTED))
    return f"{_path(place)} is {_describe(error['input'])}; it must be {', or '.join(expected)[:MAX_MESSAGE_CHARS]}"


def _expected(error: ErrorDetails) -> str:
    match error["type"]:
        case "greater_than_equal":
            return f"{error['msg'].rpartition(' ')[2]} or more"
        case "less_than_equal":
            return f"{error['msg'].rpartition(' ')[2]} or less"
        case "dict_type" | "model_type" | "model_attributes_type":
            return "an object"
    return error["msg"].removeprefix(EXPECTED)


def _describe(value: Any) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return json.dumps(value[:MAX_VALUE_CHARS] if isinstance(value, str) else value, default=repr)[:MAX_VALUE_CHARS]


def _path(place: Location) -> str:
    path = ".".join(str(step)[:MAX_PATH_CHARS] for step in place[:20])
    return path[:MAX_PATH_CHARS] or "the body"


def _json_error(reason: str) -> ApiError:
    return bad_request(f"the body is not valid JSON: {reason}", None, "invalid_json")
