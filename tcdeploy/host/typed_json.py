"""Converts parsed JSON to dataclasses, and refuses values of another type.

Files of a cache folder may hold anything, so a field of another type must be an error that names it, and not an
AttributeError somewhere in the planner. The types come from the annotations of the dataclass. pydantic does the same
and more, but it is not installed where a bundle is only run. Does not import torch.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def from_json(kind: type[T], value: Any, name: str = "it") -> T:
    """The dataclass `kind` from a JSON object with exactly its fields, also those with a default.

    Lists become tuples where the annotation says so. Raises ValueError that names the field, `name` for the whole.
    """
    converted: T = _convert(kind, value, name)
    return converted


def check_fields(kind: type[Any], value: Any, name: str = "it") -> None:
    """Check the types of those fields of a JSON object that the dataclass `kind` has. Raises ValueError.

    Another version may have written the object, so fields may be missing or unknown, in nested objects too.
    """
    if not isinstance(value, dict):
        raise _wrong_type("a JSON object", value, name)
    for field, hint in _hints(kind).items():  # type: ignore[arg-type]  # mypy does not regard a type as hashable
        if field in value:
            _convert(hint, value[field], f"{name}.{field}", is_exact=False)


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _convert(kind: Any, value: Any, name: str, is_exact: bool = True) -> Any:
    """`is_exact`: whether objects have exactly the fields of their class, and literals one of the named values."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return _to_dataclass(kind, value, name) if is_exact else check_fields(kind, value, name)  # type: ignore[arg-type]
    if origin in (Union, types.UnionType):
        return _to_union(arguments, value, name, is_exact)
    if origin is Literal:
        if type(value) not in map(type, arguments) or (is_exact and value not in arguments):
            raise ValueError(f"{name} is {value!r:.50}; it must be one of {', '.join(map(repr, arguments))}")
        return value
    if origin is tuple:
        return _to_tuple(arguments, value, name, is_exact)
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise _wrong_type("a JSON object", value, name)
        return {key: _convert(arguments[1], item, f"{name}.{key:.50}", is_exact) for key, item in value.items()}
    return _to_scalar(kind, value, name)


def _to_dataclass(kind: Any, value: Any, name: str) -> Any:
    if not isinstance(value, dict):
        raise _wrong_type("a JSON object", value, name)
    hints = _hints(kind)
    if wrong := sorted(hints.keys() ^ value.keys()):
        raise ValueError(f"{name}.{wrong[0]:.50} {'is missing' if wrong[0] in hints else 'is unknown'}")
    return kind(**{field: _convert(hints[field], item, f"{name}.{field}") for field, item in value.items()})


def _to_union(kinds: tuple[Any, ...], value: Any, name: str, is_exact: bool) -> Any:
    problems = []
    for kind in kinds:
        try:
            return _convert(kind, value, name, is_exact)
        except ValueError as problem:
            problems.append(problem)
    raise problems[0]


def _to_tuple(kinds: tuple[Any, ...], value: Any, name: str, is_exact: bool) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong_type("a list", value, name)
    if kinds[1:] == (Ellipsis,):
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        raise ValueError(f"{name} has {len(value)} elements instead of {len(kinds)}")
    numbered = enumerate(zip(kinds, value, strict=True))
    return tuple(_convert(kind, item, f"{name}[{index}]", is_exact) for index, (kind, item) in numbered)


def _to_scalar(kind: Any, value: Any, name: str) -> Any:
    if kind in (None, types.NoneType):
        if value is not None:
            raise _wrong_type("null", value, name)
        return value
    # an int for a float stays one, so that equal documents give equal text
    if not isinstance(value, int | float if kind is float else kind) or (isinstance(value, bool) and kind is not bool):
        raise _wrong_type(f"of type {kind.__name__}", value, name)
    return value


def _wrong_type(expected: str, value: Any, name: str) -> ValueError:
    return ValueError(f"{name} is {value!r:.50}; it must be {expected}")
