"""Structured output through llguidance: JSON schemas, regexes, choices, grammars and forced tool calls.

Grammars are compiled in threads and without the GIL, so neither the event loop nor the engine waits. The exception is
the first request with a grammar, if the tables do not exist yet: building them holds the GIL. Each request compiles its
own grammar: a shared one would save at most 0.1 s, but would add up the lexer states of all its users until the limit
of one request ends them all.

The cost of a client's schema is bounded: its size by this module, and the work and memory per token by llguidance's
limits (PARSER_LIMITS). A regex or a grammar may be far more ambiguous than a schema of the same size, so its limits are
lower (GRAMMAR_LIMITS). The masks of a step are computed in one call outside the GIL; the choices of one request share a
lock inside llguidance and are computed one after another. Timings: docs/performance-log.md. json_schema.py rewrites
schemas before they are compiled.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from tcdeploy.engine.schedule.constraint import MatchStatus
from tcdeploy.planning.extras import is_installed
from tcdeploy.server.apis.openai.protocol import ApiError, bad_request
from tcdeploy.server.apis.openai.validation import count_chars
from tcdeploy.server.output.structured.json_schema import MAX_PROPERTIES, count_properties, exact_schemas, objects
from tcdeploy.server.output.structured.output_constraint import OutputConstraint

if TYPE_CHECKING:  # importing numpy takes 0.1 s; the socket answers before
    import numpy
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

MAX_SCHEMA_CHARS = 128 << 10
MAX_CHARS = {"regex": 8 << 10, "grammar": 32 << 10, "choice": 32 << 10}  # by kind; of all choices together
MAX_PATTERN_CHARS, MAX_PATTERNS_CHARS = 4 << 10, 32 << 10  # of one regex in a schema, and of all
COMPILE_THREADS, MASK_THREADS = 2, 4
PARSER_LIMITS = {
    "max_items_in_row": 8_000,  # an object with 1,000 optional fields needs 4,007
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 20_000,  # 1 to 2 KB per state
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# For a client's regex or grammar. With PARSER_LIMITS, three nested repetitions of an optional letter take 0.3 s for
# each token, and `(.*)` 5,000 times in a row takes 4 s and 370 MB to compile. With these limits and the lengths above,
# a step takes 0.02 s at most, and compilation about 1 s and 70 MB.
GRAMMAR_LIMITS = {
    **PARSER_LIMITS, "max_items_in_row": 1_000, "step_max_items": 5_000, "initial_lexer_fuel": 16_000,
}  # fmt: skip
CHOICE_LIMITS = {**GRAMMAR_LIMITS, "initial_lexer_fuel": 200_000}  # literal texts are cheap, but need more fuel
LARK_LINE = re.compile(r"%llguidance\b|start(\.\d+)?\s*:(?!:=)")
NOT_INSTALLED = "requires llguidance, which is not installed (install the extra `structured`)"
log = logging.getLogger("tcdeploy.server")


class StructuredOutputBackend:
    """Compiles grammars for one model. Public methods except `__init__` must be called in the event loop's thread.

    The tables for the tokenizer are built by `build_tables`, or by the first call that needs them, in a thread. For
    128,256 tokens that takes 0.9 s, and llguidance holds the GIL meanwhile. They are not built before /ready, because
    most requests need none.
    """

    def __init__(self, tokenizer: Any, stop_token_ids: tuple[int, ...]) -> None:
        self._compilers = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        self._source, self._stop_token_ids = tokenizer, stop_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._building: Future[None] | None = None
        self._unavailable_reason = "" if is_installed("llguidance") else NOT_INSTALLED  # "" if available, or not known

    @property
    def needs_tables(self) -> bool:
        """Whether `build_tables` has something to do."""
        return self._building is None and not self._unavailable_reason

    async def build_tables(self) -> None:
        """Build the tables, unless that has been done. Returns when they are built, or grammars are not available."""
        if self.needs_tables:
            self._building = self._compilers.submit(self._build)
        if self._building is not None:
            await asyncio.shield(asyncio.wrap_future(self._building))  # for other requests, if this one is cancelled

    def _build(self) -> None:
        try:
            self._tokenizer = make_ll_tokenizer(self._source, self._stop_token_ids)
            self._masker = GrammarMasker(self._tokenizer)
        except ImportError:
            self._unavailable_reason = NOT_INSTALLED
        except Exception as error:  # llguidance does not document which exceptions a tokenizer may cause
            self._unavailable_reason = f"is not supported for this model's tokenizer: {error}"

    async def check_available(self, field: str) -> None:
        """Build the tables. Raises ApiError 400 that names `field` if grammars are not available."""
        await self.build_tables()
        if self._unavailable_reason:
            raise bad_request(f"{field} {self._unavailable_reason}", field, "unsupported_parameter")

    def check_size(self, schemas: list[Any], field: str) -> None:
        """Raises ApiError 400. Writing a schema of megabytes as JSON would block the event loop."""
        _check_limit("the schema", sum(map(count_chars, schemas)), "characters", MAX_SCHEMA_CHARS, field)
        _check_limit("the schema", sum(map(count_properties, schemas)), "properties", MAX_PROPERTIES, field)
        lengths = pattern_lengths(schemas)
        if max(lengths, default=0) > MAX_PATTERN_CHARS or sum(lengths) > MAX_PATTERNS_CHARS:
            raise bad_request(
                f"the regexes of the schema are too long; the limits are {MAX_PATTERN_CHARS} characters of one regex, "
                f"and {MAX_PATTERNS_CHARS} of all", field,
            )  # fmt: skip

    async def compile(self, constraint: OutputConstraint) -> GrammarMatcher:
        """The grammar of a constraint. Raises ApiError 400 that names its field."""
        kind, value, field = constraint
        if kind == "json":
            return await self.compile_json_schema(parse_schema(constraint), field)
        await self.check_available(field)
        num_chars = len(value) if isinstance(value, str) else sum(map(len, value))
        _check_limit(f"the {kind} in {field}", num_chars, "characters", MAX_CHARS[kind], field)
        if not value or not all(value):
            empty = "is empty or contains an empty string" if kind == "choice" else "is empty"
            raise bad_request(f"the {kind} in {field} {empty}", field)
        return await self._run(kind, value, field)

    async def compile_json_schema(self, schema: dict[str, Any], field: str) -> GrammarMatcher:
        """The grammar of a JSON schema. Raises ApiError 400 that names `field`, which contained the schema."""
        await self.check_available(field)
        self.check_size([schema], field)
        return await self._run("schema", schema, field)

    async def compile_lark(self, lark: str, field: str) -> GrammarMatcher:
        """The same for a grammar in llguidance's Lark syntax, built from schemas in `field`."""
        await self.check_available(field)
        return await self._run("lark", lark, field)

    async def _run(self, *arguments: Any) -> GrammarMatcher:
        return await asyncio.get_running_loop().run_in_executor(self._compilers, self._compile, *arguments)

    def _compile(self, kind: str, value: Any, field: str) -> GrammarMatcher:
        """Raises ApiError 400 if the grammar is invalid, or no text satisfies it."""
        from llguidance import LLMatcher, LLParserLimits

        assert self._tokenizer is not None
        limits = LLParserLimits(
            **{"schema": PARSER_LIMITS, "lark": PARSER_LIMITS, "choice": CHOICE_LIMITS}.get(kind, GRAMMAR_LIMITS)
        )
        try:
            ll_matcher = LLMatcher(self._tokenizer, _grammar(kind, value), log_level=0, limits=limits)
            ll_matcher.compute_bitmask()  # does most of the first token's work, and detects unsatisfiable schemas
            if ll_matcher.is_error() or ll_matcher.is_stopped():
                raise ValueError(ll_matcher.get_error() or "no value satisfies it")
        except (ValueError, RecursionError) as error:
            raise constraint_error("schema" if kind == "lark" else kind, error, field) from None
        return GrammarMatcher(ll_matcher, self._masker)


def parse_schema(constraint: OutputConstraint) -> dict[str, Any]:
    """The schema of a JSON constraint, which may be JSON text. Raises ApiError 400."""
    schema, field = constraint.value, constraint.field
    if isinstance(schema, str):
        _check_limit("the schema", len(schema), "characters", MAX_SCHEMA_CHARS, field)
        try:
            schema = from_json(schema)
        except ValueError as error:
            raise constraint_error("schema", error, field) from None
    if not isinstance(schema, dict):
        raise bad_request(f"the schema in {field} is not a JSON object", field)
    return schema


def _grammar(kind: str, value: Any) -> str:
    """A constraint in llguidance's own format. Raises ValueError or RecursionError if it is invalid."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if kind == "regex":
        return LLMatcher.grammar_from_regex(_without_anchors(value))
    if kind == "choice":  # as one lexeme, because a parser's row has an item for each alternative of a rule
        characters = ([char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text] for text in value)
        return LLMatcher.grammar_from_regex("|".join(map("".join, characters)))
    if kind in ("schema", "lark"):
        text = value if kind == "lark" else json.dumps(exact_schemas([value])[0], ensure_ascii=False)
        if len(text) > MAX_SCHEMA_CHARS:
            raise ValueError(f"it becomes a grammar of {len(text)} characters; the limit is {MAX_SCHEMA_CHARS}")
        return LLMatcher.grammar_from_lark(text) if kind == "lark" else LLMatcher.grammar_from_json_schema(text)
    if _is_lark(value):
        return LLMatcher.grammar_from_lark(value)
    try:
        lark = gbnf_to_lark(value)
    except (ValueError, RecursionError):
        raise
    except Exception as error:  # the converter raises plain Exception and IndexError for syntax errors
        raise ValueError(f"{error}; a grammar is Lark with a rule `start`, or GBNF with a rule `root`") from error
    return LLMatcher.grammar_from_lark(lark)


def _is_lark(grammar: str) -> bool:
    """llguidance's own test is a regex that holds the GIL for seconds if a grammar begins with many empty lines."""
    return any(LARK_LINE.match(line.lstrip()) for line in grammar.splitlines())


def _without_anchors(regex: str) -> str:
    """The regex without `^` at its start and `$` at its end. llguidance always matches the whole text."""
    stripped = regex.removeprefix("^")
    num_backslashes = len(stripped) - 1 - len(stripped.removesuffix("$").rstrip("\\"))
    if stripped.endswith("$") and num_backslashes % 2 == 0:
        stripped = stripped[:-1]
    return stripped


def make_ll_tokenizer(tokenizer: Any, stop_token_ids: tuple[int, ...]) -> LLTokenizer:
    """As `llguidance.hf.from_tokenizer`, which imports transformers. Raises ImportError without llguidance."""
    from llguidance import LLTokenizer

    backend = tokenizer.backend_tokenizer
    if backend.padding is not None or backend.truncation is not None:
        backend = copy.copy(backend)  # takes 0.45 s for 128,256 tokens, because it writes and parses JSON
        backend.no_padding()
        backend.no_truncation()
    return LLTokenizer(backend.to_str(), eos_token=list(stop_token_ids) or tokenizer.eos_token_id)


class GrammarMasker:
    """Computes the token masks of a step in llguidance's threads, without the GIL. Implements the engine's `Masker`."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        self._executor, self._fill_bitmask = LLExecutor(MASK_THREADS), fill_next_token_bitmask_par
        self._mask_words = -(-tokenizer.vocab_size // 32)  # the model's vocabulary may be larger or smaller

    def fill(self, matcher_rows: Sequence[tuple[GrammarMatcher, int]], masks: NDArray[numpy.int32]) -> None:
        import numpy

        words = masks.shape[1]  # masks: [rows, words of 32 tokens]
        filled = masks if words == self._mask_words else numpy.zeros((len(masks), self._mask_words), masks.dtype)
        self._fill_bitmask(self._executor, [(matcher.ll_matcher, row) for matcher, row in matcher_rows], filled)
        if filled is not masks:
            for _, row in matcher_rows:
                masks[row, : self._mask_words] = filled[row, :words]


class GrammarMatcher:
    """A compiled grammar at a place of an output: the engine's `Constraint` and `Matcher`. An error is permanent."""

    def __init__(self, ll_matcher: LLMatcher, masker: GrammarMasker) -> None:
        self.ll_matcher, self.masker = ll_matcher, masker

    def start(self) -> GrammarMatcher:
        return GrammarMatcher(self.ll_matcher.deep_copy(), self.masker)  # 10 us: the compiled grammar is shared

    def accept(self, token_id: int) -> MatchStatus:
        self.ll_matcher.consume_token(token_id)
        if self.ll_matcher.is_error():
            log.warning("a grammar failed: %s", self.ll_matcher.get_error())
            return "error"
        return "stop" if self.ll_matcher.is_stopped() else ""


def pattern_lengths(schemas: Any) -> list[int]:
    """The lengths of all regexes in JSON schemas."""
    patterns: list[Any] = []
    for item in objects(schemas):
        named = item.get("patternProperties")
        patterns += [item.get("pattern"), *(named if isinstance(named, dict) else ())]
    return [len(pattern) for pattern in patterns if isinstance(pattern, str)]


def _check_limit(name: str, count: int, unit: str, limit: int, field: str) -> None:
    if count > limit:
        raise bad_request(f"{name} has {count} {unit}; the limit is {limit}", field)


def constraint_error(kind: str, error: Exception, field: str) -> ApiError:
    """The error for a constraint in `field` that cannot be compiled."""
    return bad_request(f"the {kind} in {field} cannot be used: {' '.join(str(error).split())[:500]}", field)
