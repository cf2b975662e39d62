"""Grammars of rewritten schemas: numbers are exact, annotations constrain nothing, and the rest is refused by name."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tcdeploy.server.output.structured.json_schema import exact_schema, exact_schemas
from tcdeploy.server.output.structured.schema_numbers import UnsupportedSchemaError
from tcdeploy.server.output.structured.structured_output import PARSER_LIMITS
from tcdeploy.server.output.tools import call_grammar
from tcdeploy.text.tool_formats import TOOL_FORMATS, ForcedCall

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*"  # the beginning of pydantic's regexes for Decimal
BYTES = LLTokenizer("byte")


def accepts(schema: dict[str, Any]) -> Callable[[str], bool]:
    """Whether the grammar of a schema allows a text."""
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(exact_schema(schema), ensure_ascii=False))
    matcher = LLMatcher(BYTES, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
    assert not matcher.is_error(), matcher.get_error()

    def is_allowed(text: str) -> bool:
        copy, tokens = matcher.deep_copy(), list(text.encode())
        return copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()

    return is_allowed


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        # a bound next to an exclusive bound that is an integer
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.1", "0.49"], ["0", "-0", "0.0", "0.5"]),
        ({"exclusiveMinimum": -0.5, "exclusiveMaximum": 0}, ["-0.1"], ["0", "-0", "-0.0", "-0.5"]),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1.25", "1.5"], ["1", "1.0"]),
        ({"minimum": -1.5, "exclusiveMaximum": -1}, ["-1.25", "-1.5"], ["-1", "-1.0"]),
        ({"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]}, ["0.1"], ["0"]),
        ({"exclusiveMinimum": 1}, ["2", "1.5"], ["1", "1.00000000000000000001"]),
        ({"exclusiveMinimum": -1, "exclusiveMaximum": 1}, ["0.9", "-0.99", "0"], ["1", "1.0", "-1"]),
        ({"minimum": 1, "exclusiveMinimum": 1, "maximum": 9}, ["2"], ["1"]),
        # too small for a text of few digits
        ({"minimum": 5e-324, "maximum": 1}, ["0.5", "1"], ["0", "0.0"]), ({"exclusiveMinimum": 1e-300}, ["3"], ["0"]),
        ({"minimum": -5e-324}, ["0", "1"], ["-1", "-0.1"]), ({"exclusiveMaximum": 1e-20}, ["0", "-1"], ["1", "0.1"]),
        # the flags of draft 4
        ({"minimum": 1, "exclusiveMinimum": True}, ["2"], ["1"]),
        ({"minimum": 1, "exclusiveMinimum": False}, ["1"], []),
        # beyond 2^53
        ({"minimum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53), str(2**53 + 1)]),
        ({"exclusiveMinimum": 1152921504606847200}, ["1152921504606847500"], ["1152921504606847200"]),
        ({"exclusiveMaximum": -1152921504606847200}, ["-1152921504606847500"], ["-1152921504606847200"]),
        ({"maximum": 1e308}, ["0", "-5", "1.5"], []), ({"minimum": 0, "maximum": 10**400}, ["5"], ["-1"]),
        # more digits than llguidance reads
        ({"minimum": 123456789.12345679, "maximum": 123456790}, ["123456789.5"], ["123456789.12345678"]),
    ],
    ids=str,
)  # fmt: skip
def test_a_number_is_within_its_bounds(schema: dict[str, Any], allowed: list[str], refused: list[str]) -> None:
    is_allowed = accepts({"type": "number", **schema})
    assert all(map(is_allowed, allowed)) and not any(map(is_allowed, refused))


@pytest.mark.parametrize(
    ("bounds", "allowed", "refused"),
    [
        ({"minimum": INT64_MIN, "maximum": INT64_MAX}, [0, -5, 2**62], [2**63, -(2**63) - 1]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [0, 10**18], [2**64, -1]),
        ({"exclusiveMinimum": 2**53}, [2**53 + 2], [2**53]), ({"maximum": -(2**53) - 1}, [-(2**54)], [-(2**53)]),
        ({"minimum": 10**18}, [10**18, 2 * 10**18], [10**18 - 1]), ({"maximum": -(10**18)}, [-(10**18)], [0]),
        ({"exclusiveMinimum": 0.5, "maximum": 3.7}, [1, 3], [0, 4]), ({"minimum": -(10**30)}, [0, -5], []),
    ],
    ids=str,
)  # fmt: skip
def test_an_integer_is_within_its_bounds(bounds: dict[str, Any], allowed: list[int], refused: list[int]) -> None:
    is_allowed = accepts({"type": "integer", **bounds})
    assert all(map(is_allowed, map(str, allowed))) and not any(map(is_allowed, map(str, refused)))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_bound_of_numbers_also_holds_for_integers(sign: int) -> None:
    """llguidance writes 2^60 as 1152921504606847000 in a range of numbers, and exactly in one of integers."""
    inner, outer = ("minimum", "maximum")[::sign]
    number = {"type": "number", inner: sign * 2.0**60}
    is_allowed = accepts({"allOf": [number, {"type": "integer", outer: sign * 2.0**61}]})
    assert is_allowed(str(sign * (2**60 + 256))) and not is_allowed(str(sign * 2**60))


@pytest.mark.parametrize("value", [2**53, -(2**53), 2**60, INT64_MAX - 1023, 0, 0.1, -2.5, 1e-7, 0.30000000000000004])
def test_a_listed_number_is_exact(value: Any) -> None:
    """Also inside of other values."""
    text = f"{Decimal(repr(value)):f}"
    assert accepts({"enum": ["a", value]})(text) and accepts({"const": {"a": [value]}})(f'{{"a":[{text}]}}')


@pytest.mark.parametrize(
    "value",
    [
        1234567890123456789, 2**53 + 1, INT64_MIN, INT64_MIN + 1, INT64_MAX, 2**63, 2**64, -1e30, 1e22,
        123456789.12345679,
    ],
)  # fmt: skip
def test_a_listed_number_that_llguidance_would_change_is_refused(value: Any) -> None:
    """INT64_MIN as a constant ends the process of llguidance 1.9."""
    for schema in ({"enum": [1, value]}, {"const": value}, {"const": [{"a": value}]}):
        with pytest.raises(UnsupportedSchemaError) as rejection:
            exact_schema({"type": "object", "properties": {"id": schema}})
        assert str(value) in str(rejection.value) and "#/properties/id" in str(rejection.value)


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "integer", "minimum": 2**63}, "beyond 2^63"), ({"minimum": 1e19}, "beyond 2^63"),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, "from 9007199254740993 to"),
        ({"minimum": float("inf")}, "infinite"), ({"maximum": float("nan")}, "not a number"),
        ({"propertyNames": {"not": {}}}, "propertyNames with not"), ({"propertyNames": {"type": "integer"}}, "strings"),
        ({"propertyNames": {"pattern": "a"}, "properties": {"b": {}}}, "cannot be combined with properties"),
        ({"propertyNames": {"enum": ["a", "b"], "const": "a"}}, "propertyNames with const and enum"),
        ({"propertyNames": {"$ref": "#/x", "maxLength": 1}, "x": {"enum": ["a"]}}, r"propertyNames with \$ref, maxLen"),
        ({"propertyNames": {"$ref": "names.json"}}, "propertyNames is not a schema"),
        ({"propertyNames": 5}, "propertyNames is not a schema"),
        ({"$ref": "#/x/y", "x": {"y": {"const": 2**53 + 1}}}, "at #/x/y"),
        ({"$ref": "#/propertyNames", "propertyNames": {"enum": ["a"]}}, "'propertyNames' is not supported"),
    ],
    ids=str,
)  # fmt: skip
def test_a_schema_that_cannot_be_followed_is_refused(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedSchemaError, match=reason.replace("^", r"\^")):
        exact_schema(schema)


@pytest.mark.parametrize("schema", [{"multipleOf": 1000003}, {"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}])
def test_multiples_that_take_long_to_compile_are_refused(schema: dict[str, Any]) -> None:
    """Each takes over 15 s in llguidance."""
    with pytest.raises(UnsupportedSchemaError, match="multipleOf .* is too large"):
        exact_schema(schema)
    assert accepts({"type": "integer", "multipleOf": 9973})("19946")
    assert accepts({"type": "number", "multipleOf": 0.01})("1.25")


def test_common_multiples_do_not_overflow() -> None:
    """llguidance computes them as uint32: 10^5 and 10^6 would allow neither."""
    with pytest.raises(UnsupportedSchemaError):
        exact_schema({"allOf": [{"multipleOf": 10**5}, {"multipleOf": 10**6}]})


@pytest.mark.parametrize("name", ["byte", "binary", "password", "uri-reference", "regex", "json-pointer", "uuid4", "x"])
def test_an_unknown_format_is_an_annotation(name: str) -> None:
    assert accepts({"type": "string", "format": name, "maxLength": 3})('"a/b"')
    assert not accepts({"type": "string", "format": "date"})('"a/b"')


def test_properties_may_have_the_names_of_keywords() -> None:
    is_allowed = accepts(
        {"type": "object", "properties": {"format": {"const": "x"}, "propertyNames": {"type": "null"}}}
    )
    assert is_allowed('{"format":"x","propertyNames":null}') and not is_allowed('{"format":"y"}')


@pytest.mark.parametrize(
    ("names", "allowed", "refused"),
    [
        ({"type": "string"}, ["a", "xyz"], []), (True, ["a"], []), ({"format": "uuid", "title": "Id"}, ["a"], []),
        ({"enum": ["a", "b"]}, ["a", "b"], ["c"]), ({"$ref": "#/$defs/key"}, ["a", "b"], ["c"]),
        ({"const": "a"}, ["a"], ["b"]), ({"minLength": 2, "maxLength": 3.0}, ["xy", "xyz"], ["x", "wxyz"]),
        ({"pattern": "^[ab]+$"}, ["a", "abab"], ["c", ""]), ({"type": "string", "maxLength": 1}, ["a"], ["ab"]),
    ],
    ids=str,
)  # fmt: skip
def test_property_names_are_restricted(names: Any, allowed: list[str], refused: list[str]) -> None:
    is_allowed = accepts(
        {
            "type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"},
            "$defs": {"key": {"enum": ["a", "b"]}},
        }
    )  # fmt: skip
    assert all(is_allowed(f'{{"{name}":1}}') for name in allowed) and is_allowed("{}")
    assert not any(is_allowed(f'{{"{name}":1}}') for name in refused) and not is_allowed('{"a":"text"}')


def test_many_property_names_are_refused_before_they_are_copied() -> None:
    names = {"enum": [f"name{number}" for number in range(1500)]}
    schema_of_names = {"propertyNames": {"$ref": "#/$defs/names"}, "additionalProperties": {"type": "null"}}
    schema = {"properties": {"a": schema_of_names, "b": schema_of_names}, "$defs": {"names": names}}
    with pytest.raises(UnsupportedSchemaError, match="makes 3002 properties; the limit is 2000"):
        exact_schemas([schema])
    with pytest.raises(UnsupportedSchemaError, match="makes 3000 properties"):
        exact_schemas([{**schema_of_names, "$defs": {"names": names}}] * 2)
    with pytest.raises(UnsupportedSchemaError, match="lists 1500 names for a long schema"):
        exact_schema({"propertyNames": names, "additionalProperties": {"enum": list(range(1000))}})


@pytest.mark.parametrize(
    "items", [{"enum": ["x", "y"]}, {"$ref": "#/$defs/e"}, {"const": "x"}, {"type": "boolean"}], ids=str
)
def test_a_set_has_at_most_as_many_items_as_values(items: dict[str, Any]) -> None:
    schema = {"type": "array", "items": items, "uniqueItems": True, "$defs": {"e": {"enum": ["x", "y"]}}}
    is_allowed, value = accepts(schema), "true" if "type" in items else '"x"'
    assert is_allowed("[]") and is_allowed(f"[{value}]") and not is_allowed(f"[{value},{value},{value}]")


def test_the_items_of_other_sets_may_repeat() -> None:
    assert accepts({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})("[1,1,2]")


@pytest.mark.parametrize(
    ("rest", "allowed", "refused"),
    [
        (r"\d*\.?\d*$", ["1", "-1.50", ".5", "1.", "007"], ["", ".", "-", "1e5", "a"]),
        (r"\d*\.?\d{0,2}0*$", ["1", "1.25", "+.5"], ["1.255", ".", "-"]),
        (r"(?:\d{0,8}|(?=[\d.]{1,11}0*$)\d{0,8}\.\d{0,2}0*$)", ["12345678.12", "0.5"], ["123456789", "1.255", "."]),
        (r"(?:\d{0,4}|(?=[\d.]{1,5}0*$)\d*\.\d*0*$)", ["1234", "1.234", ".5"], ["12345", "12.345", "."]),
        (r"(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,4}0*$)", [".12"], [".123", "1"]),
    ],
)  # fmt: skip
def test_pydantics_regexes_for_decimals_are_followed(rest: str, allowed: list[str], refused: list[str]) -> None:
    is_allowed = accepts({"type": "string", "pattern": DECIMAL + rest})
    assert all(is_allowed(f'"{text}"') for text in allowed) and not any(is_allowed(f'"{text}"') for text in refused)


@pytest.mark.parametrize(
    ("pattern", "allowed", "refused"),
    [
        (r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
         ["a@b.de", "a.b+c@d.e.org"], [".a@b.de", "a..b@c.de", "a@b", "a.@b.de"]),
        (r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
         ["P3W", "P1Y2M3DT4H5M6.7S", "PT5M", "P1D"], ["P", "PT", "P1DT", "P1Y2W", "T5M", "P1H"]),
        (r"^(?!\.).*$", ["", "a.b"], [".", ".a"]), (r"^(?!.*\.\.)[.a]*$", ["", ".a.a.", "a"], ["..", "a..a"]),
    ],
)  # fmt: skip
def test_zods_regexes_with_look_ahead_are_followed(pattern: str, allowed: list[str], refused: list[str]) -> None:
    for text in allowed + refused:
        assert bool(re.search(pattern, text)) == (text in allowed), "the test is wrong"
    is_allowed = accepts({"type": "string", "pattern": pattern})
    assert all(is_allowed(f'"{text}"') for text in allowed) and not any(is_allowed(f'"{text}"') for text in refused)


@pytest.mark.parametrize(
    ("pattern", "allowed", "refused"),
    [
        ("^[^a&&b]$", ["c"], ["a", "b", "&"]), ("^[a&&b]$", ["a", "b", "&"], ["c"]), ("^[a[]$", ["a", "["], ["b"]),
        ("^[[:alpha:]]$", [":]", "a]"], ["b"]), ("^[+--]$", ["+", ",", "-"], ["."]), (r"^\[[x]\[$", ["[x["], ["x"]),
        (r"^[\[\]]+[~~]$", ["[]~"], ["[]"]), ("^(a|b)[cd]$", ["ac"], ["a"]),
    ],
)  # fmt: skip
def test_brackets_in_regexes_mean_what_they_mean_in_python(
    pattern: str, allowed: list[str], refused: list[str]
) -> None:
    is_allowed = accepts({"type": "string", "pattern": pattern})
    assert all(is_allowed(f'"{text}"') for text in allowed) and not any(is_allowed(f'"{text}"') for text in refused)


def test_an_escaped_key_does_not_evade_the_schema_of_its_property() -> None:
    is_allowed = accepts({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert is_allowed('{"a":1,"b":"x"}') and not is_allowed('{"\\u0061":"x"}')


def test_the_target_of_any_reference_is_rewritten() -> None:
    schema = {
        "$ref": "#/components/schemas/A~1B",
        "components": {"schemas": {"A/B": {"type": "array", "items": {"type": "string", "format": "byte"}}}},
    }
    assert accepts(schema)('["a"]')
    assert accepts({"type": "array", "items": {"$ref": "#"}, "uniqueItems": True})("[[],[]]"), "a recursive schema"


def test_the_original_is_not_changed() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"format": "x", "minimum": 1.5, "enum": [1]}}
    text = json.dumps(schema)
    exact_schema(schema)
    assert json.dumps(schema) == text


def forced_calls(parameters: dict[str, Any]) -> dict[str, str]:
    """The text before the arguments -> the grammar of a forced call, for each kind of grammar."""
    functions = [{"name": "f", "parameters": parameters}]
    spaced = ForcedCall('{"name": "', '", "arguments": ', "}", opening="<call>", closing="</call>", allows_space=True)
    forced = TOOL_FORMATS["hermes"].forced
    assert forced is not None
    return {
        '<call>{"name": "f", "arguments": ': call_grammar(functions, spaced, json.dumps, False),
        '<tool_call>\n{"name": "f", "arguments": ': call_grammar(functions, forced, json.dumps, False),
    }


def test_the_parameters_of_forced_calls_are_rewritten_or_refused() -> None:
    for text, lark in forced_calls({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}).items():
        matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(lark), log_level=0)
        for arguments, is_valid in (("0}", False), ("0.5}", True), ("0.25}", True)):
            tokens = list(f"{text}{arguments}".encode())
            assert (matcher.deep_copy().try_consume_tokens(tokens) == len(tokens)) is is_valid, arguments
    with pytest.raises(UnsupportedSchemaError, match="9007199254740993"):
        forced_calls({"const": 2**53 + 1})


def test_large_schemas_are_rewritten_in_linear_time() -> None:
    def seconds(count: int) -> float:
        properties = {f"p{number}": {"exclusiveMinimum": 0, "maximum": number + 0.37} for number in range(count)}
        start = time.process_time()
        exact_schema({"properties": properties})
        return time.process_time() - start

    seconds(10)
    assert seconds(2000) < 40 * max(seconds(200), 1e-4)


@pytest.mark.parametrize(
    "schema",
    [
        {"format": [1]}, {"uniqueItems": 1}, {"uniqueItems": True, "items": {"enum": [1]}, "maxItems": "x"},
        {"enum": 5}, {"properties": []}, {"allOf": {}, "pattern": DECIMAL + r"\d*\.?\d*$"}, {"pattern": 5},
        {"$ref": 5}, {"$ref": "#/a/99999"}, {"minimum": "1"}, {"minimum": True},
        {"maximum": False, "type": "integer"}, {"multipleOf": -1}, {"maxLength": 2.5},
        {"propertyNames": 5}, {"propertyNames": {"enum": 5}}, {"items": [5]}, {"pattern": "["}, {"pattern": "[a\\"},
    ],
    ids=str,
)  # fmt: skip
def test_malformed_schemas_cause_no_other_error(schema: dict[str, Any]) -> None:
    try:
        exact_schema(schema)
    except UnsupportedSchemaError as error:
        assert str(error)


def test_property_names_that_allow_none_allow_only_the_empty_object() -> None:
    exact = exact_schema({"type": "object", "propertyNames": False})
    assert exact["properties"] == {} and exact["additionalProperties"] is False


def test_listed_property_names_with_another_constraint_are_refused() -> None:
    with pytest.raises(UnsupportedSchemaError, match="propertyNames with enum and minLength"):
        exact_schema({"type": "object", "propertyNames": {"enum": ["a", "bb"], "minLength": 2}})


def test_equal_numbers_of_a_set_count_once() -> None:
    for values in ([1, 1.0, True], [[1], [1.0], {"a": 2}], [{"a": 2}, {"a": 2.0}, "2"]):
        assert exact_schema({"type": "array", "uniqueItems": True, "items": {"enum": values}})["maxItems"] == 2
