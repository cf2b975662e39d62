"""Rewrites JSON schemas so that every output that llguidance generates for them is valid.

llguidance reads numbers as float64 and computes bounds as int64, and it refuses keywords and formats that do not
constrain anything. `exact_schema` returns a schema whose grammar generates a subset of the original's values:

- Bounds are replaced by the nearest ones inside of the range that llguidance reads exactly (schema_numbers.py). A value
  of `enum` or `const` that it would change is refused.
- `format` is an annotation, unless llguidance implements it. `uniqueItems` is an annotation too, because a context-free
  grammar cannot express it; a set of n possible values gets n as its limit.
- `propertyNames` becomes `properties` or `patternProperties`.
- `pattern` keeps the meaning that ECMAScript and Python give it (schema_patterns.py).
- Keys and strings contain no `\\u` escapes, because llguidance does not recognise a declared property in `"\\u0061"`.

A schema that cannot be rewritten raises UnsupportedSchemaError. Does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from tcdeploy.server.output.structured.schema_numbers import (
    NUMBER_KEYWORDS,
    UnsupportedSchemaError,
    add_multiple,
    check_values,
    integral_sizes,
    with_exact_bounds,
)
from tcdeploy.server.output.structured.schema_patterns import rewrite_pattern, with_pattern

MAX_WHITESPACE = 40  # characters in a row; a model in a loop would fill its context with white space
GRAMMAR_OPTIONS = {
    "whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}",
    "json_allowed_escapes": 'nrbtf\\"',
}
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}
SCHEMA_KEYWORDS = {
    "items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else", "unevaluatedItems",
    "unevaluatedProperties",
}  # fmt: skip
LIST_KEYWORDS = {"anyOf", "allOf", "oneOf", "prefixItems", "items"}
MAP_KEYWORDS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
ANNOTATIONS = {
    "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$id", "$anchor",
}  # fmt: skip
MAX_PROPERTIES = 2000  # 9,000 take 7 s to compile, and 40 ms to free while the GIL is held
MAX_NAMED_CHARS = 128 << 10  # of the copies of a schema for the names in `propertyNames`
MAX_REFERENCES = 32  # that are followed to find out what a property name or an item may be


def exact_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema for llguidance. Raises UnsupportedSchemaError if its grammar would allow invalid values."""
    return {**_Rewriter(schema).rewrite(), "x-guidance": GRAMMAR_OPTIONS}


def exact_schemas(schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The schemas of one grammar. Raises UnsupportedSchemaError also if they have too many properties together."""
    exact = [exact_schema(schema) for schema in schemas]
    num_properties = sum(map(count_properties, exact))
    if num_properties > MAX_PROPERTIES:
        raise UnsupportedSchemaError(f"propertyNames makes {num_properties} properties; the limit is {MAX_PROPERTIES}")
    return exact


def count_properties(schema: Any) -> int:
    """The number of properties of all objects in a JSON schema."""
    properties = (item.get("properties") for item in objects(schema))
    return sum(len(item) for item in properties if isinstance(item, dict))


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield item
            pending += item.values()
        elif isinstance(item, list):
            pending += item


class _Rewriter:
    """One schema. Subschemas are copied; what is not a schema, such as a default value, is shared."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._pointers: set[tuple[str, ...]] = set()  # of the subschemas that were rewritten
        self._references: set[str] = set()
        self._multiples: set[Fraction] = set()

    def rewrite(self) -> dict[str, Any]:
        result = self._schema(self._root, ())
        done: set[str] = set()
        while new := self._references - done:
            done |= new
            for reference in sorted(new):  # the target may be in no subschema, as in `#/components/schemas/A`
                steps, target = _pointer(reference), self._resolve(reference)
                if steps is not None and steps not in self._pointers and isinstance(target, dict):
                    result = _with_value_at(result, steps, self._schema(target, steps))
        return result

    def _schema(self, schema: Any, at: tuple[str, ...]) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._pointers.add(at)
        if isinstance(reference := schema.get("$ref"), str):
            self._references.add(reference)
        rewritten = {
            key: self._subschemas(key, value, at) if isinstance(value, dict | list) else value
            for key, value in schema.items()
        }
        try:
            return self._keywords(rewritten)
        except UnsupportedSchemaError as error:
            raise error.at(at) from None

    def _subschemas(self, key: str, value: Any, at: tuple[str, ...]) -> Any:
        if key in SCHEMA_KEYWORDS and isinstance(value, dict):
            return self._schema(value, (*at, key))
        if key in LIST_KEYWORDS and isinstance(value, list):
            return [self._schema(item, (*at, key, str(number))) for number, item in enumerate(value)]
        if key in MAP_KEYWORDS and isinstance(value, dict):
            return {name: self._schema(item, (*at, key, name)) for name, item in value.items()}
        return value

    def _keywords(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Rewrites the keywords of one schema, whose subschemas have been rewritten."""
        if not isinstance(kind := schema.get("format"), str) or kind not in FORMATS:
            schema.pop("format", None)
        if not NUMBER_KEYWORDS.isdisjoint(schema):
            check_values(schema)
            add_multiple(self._multiples, schema)
            schema = with_exact_bounds(integral_sizes(schema))
        schema = with_pattern(schema)
        if isinstance(patterns := schema.get("patternProperties"), dict):
            schema["patternProperties"] = {rewrite_pattern(name): value for name, value in patterns.items()}
        self._limit_set(schema)
        if "propertyNames" in schema:
            self._restrict_names(schema, schema.pop("propertyNames"))
        return schema

    def _limit_set(self, schema: dict[str, Any]) -> None:
        """Remove `uniqueItems`. An array of n possible values gets the limit of n items."""
        if schema.pop("uniqueItems", False) is not True or "prefixItems" in schema:
            return
        values = self._possible_values(schema.get("items"))
        if values is not None:
            count = len({_canonical(value) for value in values})
            if type(limit := schema.get("maxItems", count)) is int:
                schema["maxItems"] = min(limit, count)

    def _restrict_names(self, schema: dict[str, Any], names: Any) -> None:
        """Express `propertyNames` by `properties` or `patternProperties`."""
        names = self._referenced(names)
        if names is True:
            return
        if names is False:  # only the empty object
            names = {"enum": []}
        if not isinstance(names, dict):
            raise UnsupportedSchemaError("propertyNames is not a schema, or refers to none in the same document")
        constraints = {key: value for key, value in names.items() if key not in {*ANNOTATIONS, "format"}}
        if constraints.pop("type", "string") not in ("string", ["string"]):
            raise UnsupportedSchemaError("propertyNames must allow strings")
        if not constraints:
            return
        if schema.get("properties") or schema.get("patternProperties"):
            raise UnsupportedSchemaError("propertyNames cannot be combined with properties or patternProperties")
        value = schema.pop("additionalProperties", True)
        if (allowed := self._possible_values(names)) is not None:
            if len(constraints) > 1:
                raise UnsupportedSchemaError(f"propertyNames with {' and '.join(sorted(constraints))[:200]}")
            if len(allowed) * len(json.dumps(value)) > MAX_NAMED_CHARS:
                raise UnsupportedSchemaError(f"propertyNames lists {len(allowed)} names for a long schema")
            schema["properties"] = {name: value for name in allowed if isinstance(name, str)}
        elif pattern := _name_pattern(constraints):
            schema["patternProperties"] = {pattern: value}
        else:
            raise UnsupportedSchemaError(f"propertyNames with {', '.join(constraints)[:200]} is not supported")
        schema["additionalProperties"] = False

    def _possible_values(self, schema: Any) -> list[Any] | None:
        """The values that a schema lists, or None."""
        match self._referenced(schema):
            case {"enum": [*values]}:
                return values
            case {"const": value}:
                return [value]
            case {"type": "boolean"}:
                return [True, False]
        return None

    def _referenced(self, schema: Any) -> Any:
        """The target of a schema that is a `$ref`, or the schema itself, also if it has more constraints."""
        for _ in range(MAX_REFERENCES):
            reference = schema.get("$ref") if isinstance(schema, dict) else None
            if not isinstance(reference, str) or schema.keys() - {"$ref", "format", *ANNOTATIONS}:
                break
            schema = self._resolve(reference)
        return schema

    def _resolve(self, reference: str) -> Any:
        """The target of a JSON pointer in the original schema, or None."""
        steps = _pointer(reference)
        target: Any = self._root if steps is not None else None
        for step in steps or ():
            if isinstance(target, list) and step.isdecimal() and int(step) < len(target):
                target = target[int(step)]
            else:
                target = target.get(step) if isinstance(target, dict) else None
        return target


def _canonical(value: Any) -> str:
    """Equal texts for equal JSON values: [1] and [1.0] are equal, true and 1 are not."""
    return repr(json.loads(json.dumps(value, sort_keys=True), parse_int=Fraction, parse_float=Fraction))


def _pointer(reference: str) -> tuple[str, ...] | None:
    """The steps of a reference that is a JSON pointer in the same document, else None."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    return tuple(step.replace("~1", "/").replace("~0", "~") for step in unquote(reference).split("/")[1:])


def _with_value_at(document: Any, steps: tuple[str, ...], value: Any) -> Any:
    """A copy of the document with `value` at a pointer. Raises UnsupportedSchemaError if the place was rewritten."""
    if not steps:
        return value
    first, rest = steps[0], steps[1:]
    if isinstance(document, list):
        return [_with_value_at(item, rest, value) if str(i) == first else item for i, item in enumerate(document)]
    if not isinstance(document, dict) or first not in document:
        raise UnsupportedSchemaError(f"a $ref to {first[:80]!r} is not supported")
    return {**document, first: _with_value_at(document[first], rest, value)}


def _name_pattern(constraints: dict[str, Any]) -> str | None:
    """A regex for the names that satisfy `pattern`, or `minLength` and `maxLength`; None for other constraints."""
    match constraints:
        case {"pattern": str() as pattern, **others} if not others:
            return rewrite_pattern(pattern)
        case {**lengths} if lengths.keys() <= {"minLength", "maxLength"}:
            sizes = integral_sizes(lengths)
            if all(type(size) is int and size >= 0 for size in sizes.values()):
                return f"^(?s:.{{{sizes.get('minLength', 0)},{sizes.get('maxLength', '')}}})$"
    return None
