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

White space within the JSON is free up to MOST_SPACES characters at a time: a model that has lost its way would fill its
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
from tcdeploy.server.protocol import ApiError, refusal

if TYPE_CHECKING:  # numpy takes a tenth of a second, before which no socket would answer
    import numpy
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

MOST_SCHEMA_CHARACTERS = 128 << 10
MOST_SPACES = 40
COMPILERS, MASKERS = 2, 4  # threads; 32 masks took 0.24, 0.29 and 0.17 ms with 1, 2 and 4 on those two cores
LIMITS = {
    "max_items_in_row": 8_000,  # an object of 1,000 optional fields takes 4,007
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 20_000,  # 1 to 2 KB each
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
log = logging.getLogger("tcdeploy.server")


class Structured:
    """Makes constraints for one model. Made before the server is ready: a large tokenizer holds Python's lock 0.6 s."""

    def __init__(self, tokenizer: Any, stop_token_ids: tuple[int, ...]) -> None:
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="grammar")
        self._tokenizer: LLTokenizer | None = None
        self._missing = ""  # why nothing can be constrained
        try:
            from llguidance.hf import from_tokenizer

            self._tokenizer = from_tokenizer(tokenizer, eos_token=list(stop_token_ids) or None)
            self._masks = Masks(self._tokenizer)
        except ImportError:
            self._missing = "needs llguidance, which is not installed: pip install 'tcdeploy[structured]'"
        except Exception as error:  # whatever a foreign library says of a foreign tokenizer
            self._missing = f"does not work with this model's tokenizer: {error}"

    @property
    def is_available(self) -> bool:
        return not self._missing

    def require(self, field: str) -> None:
        """Raises ApiError that names `field`, whose meaning needs a grammar, where there can be none."""
        if self._missing:
            raise refusal(f"{field} {self._missing}", field, "unsupported_parameter")

    async def of_schema(self, schema: dict[str, Any], field: str) -> Grammar:
        """What holds an answer to a JSON schema. Raises ApiError that names `field`, where the schema stood."""
        self.require(field)
        text = json.dumps(with_bounded_spaces(schema), ensure_ascii=False)
        return await self._compiled("json_schema", text, field)

    async def of_lark(self, lark: str, field: str) -> Grammar:
        """The same of a grammar in llguidance's Lark, which was made of schemas in `field`."""
        self.require(field)
        return await self._compiled("lark", lark, field)

    async def _compiled(self, kind: str, text: str, field: str) -> Grammar:
        if len(text) > MOST_SCHEMA_CHARACTERS:
            raise refusal(f"the schema has {len(text)} characters, and {MOST_SCHEMA_CHARACTERS} is the most", field)
        return await asyncio.get_running_loop().run_in_executor(self._compilers, self._compile, kind, text, field)

    def _compile(self, kind: str, text: str, field: str) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        assert self._tokenizer is not None
        try:
            grammar = LLMatcher.grammar_from_lark(text) if kind == "lark" else LLMatcher.grammar_from_json_schema(text)
        except ValueError as error:
            raise _refused(str(error), field) from None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
        matcher.compute_bitmask()  # most of a first token's work; and a schema that nothing satisfies is found here
        if matcher.is_error() or matcher.is_stopped():
            raise _refused(matcher.get_error() or "nothing satisfies it", field)
        return Grammar(matcher, self._masks)


class Masks:
    """Of all answers of one model, as the engine's `Masker`: the library has threads for it, without Python's lock."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        from llguidance import LLExecutor
        from llguidance.numpy import fill_next_token_bitmask_par

        self._executor, self._fill = LLExecutor(MASKERS), fill_next_token_bitmask_par
        self._words = -(-tokenizer.vocab_size // 32)  # the model may have more tokens, or fewer

    def fill(self, matcher_rows: Sequence[tuple[Position, int]], masks: NDArray[numpy.int32]) -> None:
        import numpy

        words = masks.shape[1]
        found = masks if words == self._words else numpy.zeros((len(masks), self._words), masks.dtype)
        self._fill(self._executor, [(position.matcher, row) for position, row in matcher_rows], found)
        if found is not masks:
            for _, row in matcher_rows:
                masks[row, : self._words] = found[row, :words]


class Grammar:
    """A compiled schema, as the engine's `Constraint`."""

    def __init__(self, matcher: LLMatcher, masks: Masks) -> None:
        self._matcher, self._masks = matcher, masks

    def start(self) -> Position:
        return Position(self._matcher.deep_copy(), self._masks)  # 10 us: the compiled parts are shared


class Position:
    """One answer's place in a grammar. The library reports and does not raise; whatever it reports is for good."""

    def __init__(self, matcher: LLMatcher, masker: Masks) -> None:
        self.matcher, self.masker = matcher, masker

    def accept(self, token_id: int) -> MatchStatus:
        self.matcher.consume_token(token_id)
        if self.matcher.is_error():
            log.warning("a grammar could not go on: %s", self.matcher.get_error())
            return "error"
        return "stop" if self.matcher.is_stopped() else ""


def with_bounded_spaces(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": {"whitespace_pattern": rf"[\x20\x0A\x0D\x09]{{1,{MOST_SPACES}}}"}}


def _refused(why: str, field: str) -> ApiError:
    return refusal(f"the schema cannot be used: {' '.join(why.split())[:500]}", field)
