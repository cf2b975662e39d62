"""Replaces numbers in JSON schemas by numbers that llguidance 1.9 computes exactly.

llguidance's parser of JSON (serde_json) reads integers beyond 64 bits and all fractions as float64, and is off by one
unit in the last place for some numbers of 16 and 17 digits. llguidance then stores every number as float64, and
computes ranges of integers as int64: -2^63 is negated without a check, and the recursion ends the process. The grammar
compares numbers by the digits of their text. A client that reads float64 may therefore round 0.49999999999999999999 to
an exclusive bound of 0.5.

Bounds are replaced by float64 numbers that are read exactly and lie inside of the range. The exclusive bound that is
nearer to zero becomes the next number, because llguidance includes it if the other bound has the same integer part. For
0, the next number is SMALLEST, because the next float64 number has 324 digits. The exclusive bound that is farther from
zero is kept: if 1 became 0.9999999999999999, the texts 0.9 and 0.99 would not be allowed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

Number: TypeAlias = int | float
MAX_EXACT = 2**53  # integers up to it are float64 numbers
MAX_INTEGER = 2**63 - 1024  # the largest float64 number that is an int64
BEYOND_LIMITS = 2**70  # stands for larger numbers, which may be too large for float64
MAX_NUMBER = 9.2e18  # of bounds for fractions
MIN_DIGITS_19 = 10**18  # llguidance cannot compute a range above it that has no upper bound
SMALLEST = 1e-18  # the smallest number whose fraction llguidance reads as an int64 other than 0
# A prime factor other than 2 and 5 multiplies the states of the lexer: 9,973 takes 0.3 s to compile, 1,000,003 over
# 20 s. Common multiples are computed as uint32, without a check.
MAX_MULTIPLE_STATES, MAX_MULTIPLES_PRODUCT = 10_000, 2**32 - 1
TOO_LARGE = "numbers beyond 2^63 cannot be generated exactly"
SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
NUMBER_KEYWORDS = frozenset({"enum", "const", "multipleOf", *LOWER, *UPPER, *SIZES})


class UnsupportedSchemaError(ValueError):
    """A schema that llguidance would not follow. The message contains the place in the schema."""

    def __init__(self, reason: str, steps: tuple[str, ...] | None = None) -> None:
        place = "" if not steps else f" (at {'/'.join(('#', *steps))[:200]})"
        super().__init__(f"{reason}{place}")
        self._reason, self._steps = reason, steps

    def at(self, steps: tuple[str, ...]) -> UnsupportedSchemaError:
        """The error with its place; an error that has a place is returned unchanged."""
        return self if self._steps is not None else UnsupportedSchemaError(self._reason, steps)


def integral_sizes(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with sizes such as 2.0 as integers, which llguidance expects."""
    floats = {key: schema[key] for key in SIZES if isinstance(schema.get(key), float)}
    return {**schema, **{key: int(value) for key, value in floats.items() if value.is_integer()}}


def check_values(schema: dict[str, Any]) -> None:
    """Raises UnsupportedSchemaError if llguidance would change a number in `enum` or `const`."""
    for number in _numbers([schema.get("enum"), schema.get("const")]):
        if not _is_kept(number):
            raise UnsupportedSchemaError(
                f"the value {str(number)[:40]} cannot be generated exactly: integers must be at most 2^53, and "
                "fractions have at most 15 digits"
            )


def _numbers(value: Any) -> list[Number]:
    if isinstance(value, dict | list):
        items = value.values() if isinstance(value, dict) else value
        return [number for item in items for number in _numbers(item)]
    return [value] if _is_number(value) else []


def _is_kept(number: Number) -> bool:
    """Whether llguidance generates this value."""
    if isinstance(number, int):
        return abs(number) <= MAX_INTEGER and int(float(number)) == number
    return abs(number) <= MAX_EXACT and _is_read_exactly(number)


def with_exact_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with inclusive bounds that llguidance computes exactly."""
    bounds = {key: schema[key] for key in (*LOWER, *UPPER) if key in schema}
    if not bounds:
        return schema
    if not all(
        _is_number(value) or (isinstance(value, bool) and key in (LOWER[1], UPPER[1])) for key, value in bounds.items()
    ):
        return schema  # llguidance's error names the value
    types = schema.get("type")
    types = types if isinstance(types, list) else [types]
    # An upper bound is computed as the lower bound of the negated numbers.
    sides = list(_lower_bounds(bounds, LOWER, 1)), list(_lower_bounds(bounds, UPPER, -1))
    is_integer = "integer" in types and "number" not in types
    low, high = _integer_bounds(*sides) if is_integer else (max(map(_inside, side), default=None) for side in sides)
    limit = MAX_INTEGER if is_integer else MAX_NUMBER
    # A bound of 19 digits gets another one on its other side.
    if high is None and low is not None and low.number >= MIN_DIGITS_19:
        high = _Bound(-limit)
    if low is None and high is not None and high.number >= MIN_DIGITS_19:
        low = _Bound(-limit)
    rest = {key: value for key, value in schema.items() if key not in bounds}
    if low is not None:
        rest[LOWER[low.is_exclusive]] = low.number
    if high is not None:
        rest[UPPER[high.is_exclusive]] = -high.number
    return rest


class _Bound(NamedTuple):
    """A lower bound. Of two, the larger one holds."""

    number: Number
    is_exclusive: bool = False


def _lower_bounds(bounds: dict[str, Any], keys: tuple[str, str], sign: int) -> Iterator[_Bound]:
    """The bounds of one side, without an infinity that bounds nothing. Raises UnsupportedSchemaError."""
    inclusive, exclusive = (bounds.get(key) for key in keys)
    if isinstance(exclusive, bool):  # of draft 4: whether the other bound is exclusive
        inclusive, exclusive = (None, inclusive) if exclusive else (inclusive, None)
    for number, is_exclusive in ((inclusive, False), (exclusive, True)):
        if number is None or sign * number == -math.inf:
            continue
        if number != number:
            raise UnsupportedSchemaError("a bound is not a number")
        if abs(number) == math.inf:
            raise UnsupportedSchemaError("a bound is infinite, so no number satisfies it")
        yield _Bound(max(-BEYOND_LIMITS, min(sign * number, BEYOND_LIMITS)), is_exclusive)


def _integer_bounds(lower: list[_Bound], upper: list[_Bound]) -> tuple[_Bound | None, _Bound | None]:
    low, high = (_Bound(max(map(_first_integer, side))) if side else None for side in (lower, upper))
    if low and high and low.number <= -high.number and _representable(low).number > -_representable(high).number:
        raise UnsupportedSchemaError(f"integers from {low.number} to {-high.number} cannot be generated exactly")
    return low and _representable(low), high and _representable(high)


def _first_integer(bound: _Bound) -> int:
    """The smallest integer that a lower bound allows."""
    value = max(_meanings(bound.number))
    return math.floor(value) + 1 if bound.is_exclusive else math.ceil(value)


def _representable(bound: _Bound) -> _Bound:
    """The smallest integer from an inclusive bound on that is a float64 and an int64 number."""
    first = bound.number
    if first > MAX_INTEGER:
        raise UnsupportedSchemaError(TOO_LARGE)
    nearest = float(max(first, -MAX_INTEGER))
    return _Bound(int(nearest if nearest >= first else math.nextafter(nearest, math.inf)))


def _inside(lower: _Bound) -> _Bound:
    """The smallest lower bound from `lower` on that llguidance computes exactly."""
    bound, is_exclusive = lower
    if bound > MAX_NUMBER:
        raise UnsupportedSchemaError(TOO_LARGE)
    if bound < -MAX_NUMBER:
        return _Bound(-MAX_NUMBER)
    is_whole = abs(bound) <= MAX_EXACT and bound == int(bound)
    if is_whole and (not is_exclusive or bound < 0):
        return _Bound(int(bound), is_exclusive)
    if abs(bound) < SMALLEST:  # float64 numbers have hundreds of digits there
        return _Bound(SMALLEST if bound > 0 or (bound == 0 and is_exclusive) else 0)
    if is_exclusive and -MAX_EXACT <= bound < 0 and _is_read_exactly(bound):
        return lower
    candidate, limit = float(bound), max(_meanings(bound))
    while (
        (smallest := min(_meanings(candidate))) < limit
        or (is_exclusive and smallest == limit)
        or not _is_read_exactly(candidate)
    ):
        candidate = math.nextafter(candidate, math.inf)
    return _Bound(candidate)


def _meanings(number: Number) -> set[Decimal]:
    """What a bound may mean: its shortest text, and beyond 2^53 also its float64 value.

    JSON Schema compares the digits of the text. Clients that read float64 compare the float64 value. llguidance uses
    the text in a range of numbers, and the value if `allOf` adds the type integer.
    """
    return {_decimal(number), Decimal(number)} if abs(number) > MAX_EXACT else {_decimal(number)}


def add_multiple(multiples: set[Fraction], schema: dict[str, Any]) -> None:
    """Add the `multipleOf` of a subschema to those of the document, whose common multiple the lexer may have to count.

    Raises UnsupportedSchemaError if they need too many states together.
    """
    value: Any = schema.get("multipleOf")
    if not _is_number(value) or not 0 < value < math.inf:
        return  # llguidance refuses it
    multiples.add(Fraction(_decimal(value)))
    scale = max(value.denominator for value in multiples)
    product = math.prod(int(value * scale) for value in multiples)
    states = math.prod(_without_tens(value.numerator) for value in multiples)
    if states > MAX_MULTIPLE_STATES or (len(multiples) > 1 and product > MAX_MULTIPLES_PRODUCT):
        raise UnsupportedSchemaError(f"multipleOf {value} is too large, or there are too many different ones")


def _without_tens(number: int) -> int:
    for factor in (2, 5):
        while number % factor == 0:
            number //= factor
    return number


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _decimal(number: Number) -> Decimal:
    """The number that the shortest text of a float64 number denotes."""
    return Decimal(repr(number))


def _is_read_exactly(number: float) -> bool:
    """Whether serde_json reads a number as written: it rounds the digits, and their product with a power of ten."""
    _, digits, exponent = _decimal(number).as_tuple()
    if isinstance(exponent, str) or abs(exponent) > 300:  # infinity and NaN have a letter
        return False
    significand = float(int("".join(map(str, digits))))
    power = float(f"1e{abs(exponent)}")
    return (significand * power if exponent >= 0 else significand / power) == abs(number)
