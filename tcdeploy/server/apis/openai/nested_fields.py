"""Unknown fields inside of a request: in `response_format`, `tools`, `stream_options`, messages and their parts.

They are treated like unknown fields at the top level (unsupported_fields.py): a field that would change the answer and
is not supported is refused by name, unless its value has no effect; any other field is accepted, logged and counted
once. pydantic drops unknown fields, so they are examined before the validation. Each object is examined when pydantic
validates it, because a walk through a whole request would block the event loop. Does not import torch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

UNSUPPORTED_FIELD = "unsupported_field"  # type of the validation error
# Type of the validation error for an unsupported part or item. `path` in its context is appended to the location of the
# error.
UNSUPPORTED_PART = "unsupported_part"
MAX_NAMES = 100  # of unknown fields that are collected in one request


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


def check_kind(kind: Any, supported: tuple[str, ...], names: dict[str, str], noun: str, path: str) -> None:
    """Raise an error for an item whose `type` is a string that is not in `supported`.

    names: plural nouns for known types. noun: for all others. path: location of the item in its list.
    """
    if not isinstance(kind, str) or kind in supported:
        return
    name = names.get(kind, f"{noun} of the type {kind[:40]!r}".replace("{", "").replace("}", ""))
    raise PydanticCustomError(UNSUPPORTED_PART, f"{name} are not supported by this server", {"path": path})
