"""Answers that are JSON, or JSON of a schema (`response_format`, forced tool calls), by the grammars of llguidance.

A schema is compiled beside the event loop and the engine: 0.7 ms for one of three fields, 0.1 s for one of 1,000
(128,000 tokens, llguidance 1.9, one core), and without Python's lock. A grammar belongs to one request. To share it
would save that time and add up its states over all who use it, until the limit of one request's states ends them all.

What a stranger's schema can cost is bounded: its size here, the rest by llguidance. A mask takes 0.01 to 0.2 ms, and
under these limits 13 to 18 ms, once, in the worst that we made: 100 patterns in one array, of which each answer ends
with an error after some 170 random tokens. Its mean is 1.1 ms. A step's masks are computed in one call: of 32 answers,
each with a grammar of its own, they took 161 ms one by one beside a thread that kept Python busy, and 5.4 together. The
choices of one request share a lock within the library, so theirs are computed one after another. (AMD EPYC, two cores,
November 2026.)

White space within the JSON is free up to MAX_WHITESPACE characters at a time: a model that has lost its way would fill its
context with it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from tcdeploy.engine.constraint import MatchStatus
from tcdeploy.server.protocol import ApiError, bad_request

if TYPE_CHECKING:  # numpy takes a tenth of a second, before which no socket would answer
    import numpy
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

MAX_SCHEMA_CHARS = 128 << 10
MAX_WHITESPACE = 40
COMPILE_THREADS, MASK_THREADS = 2, 4  # threads; 32 masks took 0.24, 0.29 and 0.17 ms with 1, 2 and 4 on those two cores
PARSER_LIMITS = {
    "max_items_in_row": 8_000,  # an object of 1,000 optional fields takes 4,007
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 20_000,  # 1 to 2 KB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
log = logging.getLogger("tcdeploy.server")


class StructuredOutputBackend:
    """Makes constraints for one model. Made before the server is ready: a large tokenizer holds Python's lock 0.6 s."""

    def __init__(self, tokenizer: Any, stop_token_ids: tuple[int, ...]) -> None:
        self._compilers = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar")
        self._tokenizer: LLTokenizer | None = None
        self._unavailable_reason = ""  # why nothing can be constrained
        try:
            from llguidance.hf import from_tokenizer

            self._tokenizer = from_tokenizer(tokenizer, eos_token=list(stop_token_ids) or None)
            self._masker = GrammarMasker(self._tokenizer)
        except ImportError:
            self._unavailable_reason = "needs llguidance, which is not installed: pip install 'tcdeploy[structured]'"
        except Exception as error:  # whatever a foreign library says of a foreign tokenizer
            self._unavailable_reason = f"does not work with this model's tokenizer: {error}"

    @property
    def is_available(self) -> bool:
        return not self._unavailable_reason

    def require(self, field: str) -> None:
        """Raises ApiError that names `field`, whose meaning needs a grammar, where there can be none."""
        if self._unavailable_reason:
            raise bad_request(f"{field} {self._unavailable_reason}", field, "unsupported_parameter")

    async def compile_json_schema(self, schema: dict[str, Any], field: str) -> CompiledGrammar:
        """What holds an answer to a JSON schema. Raises ApiError that names `field`, where the schema stood."""
        self.require(field)
        text = json.dumps(with_bounded_whitespace(schema), ensure_ascii=False)
        return await self._compile_in_thread("json_schema", text, field)

    async def compile_lark(self, lark: str, field: str) -> CompiledGrammar:
        """The same of a grammar in llguidance's Lark, which was made of schemas in `field`."""
        self.require(field)
        return await self._compile_in_thread("lark", lark, field)

    async def _compile_in_thread(self, kind: str, text: str, field: str) -> CompiledGrammar:
        if len(text) > MAX_SCHEMA_CHARS:
            raise bad_request(f"the schema has {len(text)} characters, and {MAX_SCHEMA_CHARS} is the most", field)
        return await asyncio.get_running_loop().run_in_executor(self._compilers, self._compile, kind, text, field)

    def _compile(self, kind: str, text: str, field: str) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        assert self._tokenizer is not None
        try:
            grammar = LLMatcher.grammar_from_lark(text) if kind == "lark" else LLMatcher.grammar_from_json_schema(text)
        except ValueError as error:
            raise _schema_error(str(error), field) from None
        ll_matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))
        ll_matcher.compute_bitmask()  # most of a first token's work; and a schema that nothing satisfies is found here
        if ll_matcher.is_error() or ll_matcher.is_stopped():
            raise _schema_error(ll_matcher.get_error() or "nothing satisfies it", field)
        return CompiledGrammar(ll_matcher, self._masker)


class GrammarMasker:
    """Of all answers of one model, as the engine's `Masker`: the library has threads for it, without Python's lock."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        self._executor, self._fill_bitmask = LLExecutor(MASK_THREADS), fill_next_token_bitmask_par
        self._mask_words = -(-tokenizer.vocab_size // 32)  # the model may have more tokens, or fewer

    def fill(self, matcher_rows: Sequence[tuple[GrammarMatcher, int]], masks: NDArray[numpy.int32]) -> None:
        import numpy

        words = masks.shape[1]
        found = masks if words == self._mask_words else numpy.zeros((len(masks), self._mask_words), masks.dtype)
        self._fill_bitmask(self._executor, [(position.ll_matcher, row) for position, row in matcher_rows], found)
        if found is not masks:
            for _, row in matcher_rows:
                masks[row, : self._mask_words] = found[row, :words]


class CompiledGrammar:
    """A compiled schema, as the engine's `Constraint`."""

    def __init__(self, ll_matcher: LLMatcher, masks: GrammarMasker) -> None:
        self._ll_matcher, self._masker = ll_matcher, masks

    def start(self) -> GrammarMatcher:
        return GrammarMatcher(self._ll_matcher.deep_copy(), self._masker)  # 10 us: the compiled parts are shared


class GrammarMatcher:
    """One answer's place in a grammar. The library reports and does not raise; whatever it reports is for good."""

    def __init__(self, ll_matcher: LLMatcher, masker: GrammarMasker) -> None:
        self.ll_matcher, self.masker = ll_matcher, masker

    def accept(self, token_id: int) -> MatchStatus:
        self.ll_matcher.consume_token(token_id)
        if self.ll_matcher.is_error():
            log.warning("a grammar could not go on: %s", self.ll_matcher.get_error())
            return "error"
        return "stop" if self.ll_matcher.is_stopped() else ""


def with_bounded_whitespace(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MAX_WHITESPACE}}}"}}


def _schema_error(why: str, field: str) -> ApiError:
    return bad_request(f"the schema cannot be used: {' '.join(why.split())[:500]}", field)
