"""Random JSON schemas: random outputs of their grammars must be valid, with exact numbers.

A schema is generated at random (bounds at the edges of float64 and int64, exclusive bounds next to a neighbour,
`enum`, `const`, nested objects and arrays, `anyOf`, `allOf`, references, patterns, formats, property names), and
compiled as for a request. Then random tokens that the grammar allows are drawn, without a model, and the output is
parsed with exact integers and decimals, and validated by `jsonschema`. An attack succeeds if an output is not valid,
if a schema ends the process or takes longer than MAX_COMPILE_S to compile, or if it is refused without a reason.

Numbers are compared twice: the digits of the text, and the float64 number that a client reads, which may be rounded to
an exclusive bound.
"""

from __future__ import annotations

import asyncio
import decimal
import json
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import jsonschema
import numpy

from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.output.structured.structured_output import StructuredOutputBackend

DEFAULT_COUNT = 1000
OUTPUTS_PER_SCHEMA = 4
MAX_TOKENS = 400
MAX_COMPILE_S = 10  # CPU time of the process
EOS = 0
INTEGERS = [
    0, 1, -1, 5, 9, 10, 99, 100, 10**15, 2**53 - 1, 2**53, 2**53 + 1, -(2**53) - 1, 10**17 + 1, 2**62, 2**63 - 1, 2**63,
    -(2**63), -(2**63) - 1, 2**64, 10**18, 10**19, 10**30, -(10**30), 1234567890123456789,
]  # fmt: skip
FRACTIONS = [
    0.5, 0.1, -0.5, 1.5, -1.5, 0.25, 1e-7, 1e-20, 99.99, 10.5, 123456789.12345679, 0.1 + 0.2, 1e22, -1e30, 1e300,
    2.0**60, 3.0, -0.0,
]  # fmt: skip
MULTIPLES = [1, 2, 5, 7, 10, 0.5, 0.01, 0.1, 100, 3, 2.5]
PATTERNS = [
    "^[a-c]{2,4}$", r"^\d{3}-\d{2}$", "x", "^(?:ab|cd)*$", "^[^a&&b]$", r"^[a\-\[[]+$", r"^\w+@\w+\.com$", "[+--]",
    "^.{3}$",
    r"^(?!\.)(?!.*\.\.)[a-c.]*@[a-c]+\.de$",
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,6}|(?=[\d.]{1,9}0*$)\d{0,6}\.\d{0,2}0*$)",
    r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,4}|(?=[\d.]{1,5}0*$)\d*\.\d*0*$)",
]  # fmt: skip
FORMATS = ["date", "date-time", "time", "uuid", "ipv4", "ipv6", "email", "byte", "password", "uri-reference", "regex"]
NAMES = ["a", "b", "a b", "é", 'q"', "type", "enum", "\\"]
STRINGS = ["", "a", "red", "é😀", 'quote"', "back\\slash", "new\nline", "1"]


# Schemas


class SchemaSource:
    """Generates random schemas. `definitions` collects those that are referenced."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.definitions: dict[str, Any] = {}

    def document(self) -> dict[str, Any]:
        schema = self.schema(3)
        return {**schema, "$defs": self.definitions} if self.definitions else schema

    def schema(self, depth: int) -> dict[str, Any]:
        leaves = [self.number, self.number, self.number, self.string, self.values, lambda: {"type": "boolean"}]
        inner = [self.object, self.object, self.array, self.alternatives, self.combined, self.reference, self.names]
        if depth == 0 or self.source.random() < 0.4:
            return self.source.choice(leaves)()
        return self.source.choice(inner)(depth - 1)

    def bound(self) -> int | float:
        kind = self.source.random()
        if kind < 0.4:
            return self.source.choice(INTEGERS[:8])
        if kind < 0.6:
            return self.source.choice(INTEGERS)
        if kind < 0.8:
            return self.source.choice(FRACTIONS)
        return round(self.source.uniform(-20, 20), self.source.randrange(17))

    def number(self) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        if self.source.random() < 0.9:
            schema["type"] = self.source.choice(["integer", "number", "number", ["integer", "null"]])
        low = self.bound()
        high = low + self.source.choice([0, 1, 0.5, 0.1, 1e-3, 7, 1000, 2**60]) if self.source.random() < 0.7 else None
        if self.source.random() < 0.8:
            schema[self.source.choice(["minimum", "exclusiveMinimum"])] = low
        if high is not None:
            schema[self.source.choice(["maximum", "exclusiveMaximum"])] = high
        if self.source.random() < 0.15:
            schema["multipleOf"] = self.source.choice(MULTIPLES)
        return schema

    def string(self) -> dict[str, Any]:
        kind = self.source.random()
        if kind < 0.3:
            return {"type": "string", "pattern": self.source.choice(PATTERNS)}
        if kind < 0.5:
            return {"type": "string", "format": self.source.choice(FORMATS)}
        return {"type": "string", "minLength": self.source.randrange(3), "maxLength": self.source.choice([3, 4.0, 8])}

    def value(self, depth: int = 1) -> Any:
        if depth and self.source.random() < 0.2:
            items = [self.value(depth - 1) for _ in range(self.source.randrange(3))]
            return items if self.source.random() < 0.5 else dict(zip(NAMES, items, strict=False))
        numbers = [self.bound(), self.source.choice(INTEGERS[:11]), round(self.source.uniform(-9, 9), 3)]
        return self.source.choice([*numbers, *STRINGS, True, False, None])

    def values(self) -> dict[str, Any]:
        if self.source.random() < 0.4:
            return {"const": self.value()}
        return {"enum": [self.value() for _ in range(self.source.randrange(1, 5))]}

    def object(self, depth: int) -> dict[str, Any]:
        names = self.source.sample(NAMES, self.source.randrange(1, 5))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self.schema(depth) for name in names}}
        schema["required"] = [name for name in names if self.source.random() < 0.7]
        if self.source.random() < 0.8:
            schema["additionalProperties"] = False if self.source.random() < 0.6 else self.schema(0)
        return schema

    def names(self, depth: int) -> dict[str, Any]:
        names = self.source.choice(
            [{"type": "string"}, {"enum": NAMES[:4]}, {"minLength": 2, "maxLength": 4}, {"pattern": "^[ab]+$"}, True]
        )
        return {"type": "object", "propertyNames": names, "additionalProperties": self.schema(depth)}

    def array(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "array", "maxItems": self.source.randrange(1, 4)}
        if self.source.random() < 0.8:
            schema["items"] = self.schema(depth)
        if self.source.random() < 0.2:
            schema["prefixItems"] = [self.schema(depth)]
        if self.source.random() < 0.5:
            schema["minItems"] = 1
        return schema

    def alternatives(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.schema(depth) for _ in range(self.source.randrange(1, 4))]}

    def combined(self, depth: int) -> dict[str, Any]:
        """An intersection: of two ranges, or of any two schemas."""
        if self.source.random() < 0.8:
            return {"allOf": [self.number(), self.number()]}
        return {**self.schema(depth), "allOf": [self.schema(depth)]}

    def reference(self, depth: int) -> dict[str, Any]:
        name = f"d{len(self.definitions)}"
        self.definitions[name] = {}
        self.definitions[name] = self.schema(depth)
        return {"$ref": f"#/$defs/{name}"}


# Outputs


class ByteTokenizer:
    """A tokenizer whose tokens are single bytes, as `StructuredOutputBackend` needs it. The token 0 ends the output."""

    eos_token_id = EOS

    def __init__(self) -> None:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {"<eos>": EOS, **{letter: number for number, letter in enumerate(alphabet, 1)}}
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
        self.backend_tokenizer = tokenizer
        self.num_tokens = len(vocabulary)
        byte_of_letter = {letter: byte for byte, letter in _letters().items()}
        self.bytes = {number: bytes([byte_of_letter[letter]]) for number, letter in enumerate(alphabet, 1)}


def _letters() -> dict[int, str]:
    """The letter that stands for each byte in byte-level BPE: printable bytes stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def draw(source: random.Random, grammar: Any, tokenizer: ByteTokenizer) -> str | None:
    """A random output of a grammar; None if it does not end within MAX_TOKENS."""
    matcher, output = grammar.start(), b""
    words = -(-tokenizer.num_tokens // 32)
    ends_early = source.random() < 0.8
    for _ in range(MAX_TOKENS):
        masks = numpy.zeros((1, words), dtype=numpy.int32)
        matcher.masker.fill([(matcher, 0)], masks)
        bits = numpy.unpackbits(masks.view(numpy.uint8)[0], bitorder="little", count=tokenizer.num_tokens)
        allowed = numpy.flatnonzero(bits).tolist()
        if not allowed:
            return None
        token = EOS if EOS in allowed and (ends_early or len(allowed) == 1) else _choose(source, allowed, tokenizer)
        if (status := matcher.accept(token)) == "error":
            return None
        if token == EOS:
            return output.decode()
        output += tokenizer.bytes[token]
        if status == "stop":
            return output.decode()
    return None


def _choose(source: random.Random, allowed: list[int], tokenizer: ByteTokenizer) -> int:
    """Mostly characters that end a value, and few white space, so that outputs end."""
    weights = {b'"': 6, b"}": 8, b"]": 8, b",": 2, b" ": 0.05, b"\n": 0.05, b"\t": 0.05, b"\r": 0.05, b"\\": 3, b"-": 3}
    options = [token for token in allowed if token != EOS]
    return source.choices(options, [weights.get(tokenizer.bytes[token], 1) for token in options])[0]


# Validation


def problem(text: str, schema: dict[str, Any]) -> str:
    """Why an output is not valid, or "". Formats are annotations."""
    for name, parse_float in (("exact", Decimal), ("float64", float)):
        value = json.loads(text, parse_float=parse_float)
        with decimal.localcontext(decimal.Context(prec=400, Emax=10_000, Emin=-10_000)), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of Python's `re`, for `&&` and `[` in a class
            error = jsonschema.exceptions.best_match(_VALIDATOR(schema).iter_errors(value))
        if error is not None:
            return f"{name}: {error.message[:200]}"
    return ""


def _exact(number: Any) -> Decimal:
    return Decimal(repr(number)) if isinstance(number, float) else Decimal(number)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _bound(is_valid: Callable[[Decimal, Decimal], bool], name: str) -> Any:
    def check(_: Any, bound: Any, value: Any, __: Any) -> Any:
        meanings = {_exact(bound), Decimal(bound)} if abs(bound) > 2**53 else {_exact(bound)}
        rounded = isinstance(value, float) and name.startswith("exclusive") and value == bound
        if _is_number(value) and not rounded and not all(is_valid(_exact(value), meaning) for meaning in meanings):
            yield jsonschema.ValidationError(f"{value} violates {name} {bound}")

    return check


def _equal(left: Any, right: Any) -> bool:
    if _is_number(left) and _is_number(right):
        return _exact(left) == _exact(right)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(_equal, left, right))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return type(left) is type(right) and left == right


def _listed(_: Any, values: Any, value: Any, __: Any) -> Any:
    if not any(_equal(value, other) for other in values):
        yield jsonschema.ValidationError(f"{value!r} is not one of {values!r}")


def _constant(_: Any, constant: Any, value: Any, __: Any) -> Any:
    if not _equal(value, constant):
        yield jsonschema.ValidationError(f"{value!r} is not {constant!r}")


def _integer(_: Any, value: Any) -> bool:
    return _is_number(value) and _exact(value) == _exact(value).to_integral_value()


_KEYWORDS = {
    "minimum": _bound(lambda value, bound: value >= bound, "minimum"),
    "maximum": _bound(lambda value, bound: value <= bound, "maximum"),
    "exclusiveMinimum": _bound(lambda value, bound: value > bound, "exclusiveMinimum"),
    "exclusiveMaximum": _bound(lambda value, bound: value < bound, "exclusiveMaximum"),
    "multipleOf": _bound(lambda value, bound: value % bound == 0, "multipleOf"),
    "enum": _listed,
    "const": _constant,
}
_TYPES = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("number", lambda _, value: _is_number(value)).redefine(
    "integer", _integer
)
_VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, _KEYWORDS, type_checker=_TYPES)


# The run


def attack(source: random.Random, backend: StructuredOutputBackend, tokenizer: ByteTokenizer) -> tuple[str, str]:
    """The outcome for one schema, and the problem, or ""."""
    schema = SchemaSource(source).document()
    start = time.process_time()
    try:
        grammar = asyncio.run(backend.compile_json_schema(schema, "response_format"))
    except ApiError as error:
        reason = error.message.partition("cannot be used: ")[2]
        return "refused", "" if error.status == 400 and reason else f"{error.message}: {json.dumps(schema)}"
    if (seconds := time.process_time() - start) > MAX_COMPILE_S:
        return "slow", f"{seconds:.1f} s to compile {json.dumps(schema)}"
    texts = [draw(source, grammar, tokenizer) for _ in range(OUTPUTS_PER_SCHEMA)]
    for text in texts:
        if text is not None and (reason := problem(text, schema)):
            return "invalid", f"{text[:300]} for {json.dumps(schema)}: {reason}"
    return ("unfinished" if not any(texts) else "valid"), ""


def run(source: random.Random, count: int) -> dict[str, Any]:
    tokenizer = ByteTokenizer()
    backend = StructuredOutputBackend(tokenizer, (EOS,))
    outcomes: Counter[str] = Counter()
    succeeded = []
    for _ in range(count):
        outcome, reason = attack(source, backend, tokenizer)
        outcomes[outcome] += 1
        if reason:
            succeeded.append(reason)
    return {"attacks": count, "outcomes": dict(outcomes), "succeeded": succeeded}
