"""An answer with a `response_format` is JSON of its schema, whatever the model would rather say."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import jsonschema
import numpy
import openai
import pytest

from tcdeploy.server.protocol import ApiError
from tcdeploy.server.structured_output import MAX_SCHEMA_CHARS, GrammarMatcher, StructuredOutputBackend
from tests.server.conftest import ServerProcess

MODEL = "builtin:tiny"
QUESTION = [{"role": "user", "content": "What is a list?"}]
COLOURS = {"enum": ["red", "green", "blue", 7, None, True]}
FLAGS = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 199},
        "colour": COLOURS,
        "flags": FLAGS,
    },
    "required": ["name", "age", "colour", "flags"],
    "additionalProperties": False,
}
SCHEMAS = {"boolean": {"type": "boolean"}, "enum": COLOURS, "array": FLAGS, "object": PERSON}


def json_schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def chat(server: ServerProcess, **asked: Any) -> Any:
    return server.client.chat.completions.create(
        **{"model": MODEL, "messages": QUESTION, "max_tokens": 200, "temperature": 0, **asked}
    )


def complete(server: ServerProcess, number: int, **asked: Any) -> str:
    made = server.client.completions.create(
        model=MODEL, prompt=f"The module number {number} provides", temperature=0, **{"max_tokens": 30, **asked}
    )
    return made.choices[0].text


@pytest.mark.parametrize("temperature", [0, 0.8, 2])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_an_answer_satisfies_its_schema(server: ServerProcess, schema: dict[str, Any], temperature: float) -> None:
    for seed in range(1 if temperature == 0 else 5):
        [choice] = chat(server, response_format=json_schema_format(schema), temperature=temperature, seed=seed).choices
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)
    text = complete(server, 1, max_tokens=200, extra_body={"response_format": json_schema_format(schema)})
    jsonschema.validate(json.loads(text), schema)
    assert server.metric("recompiles_total") == 0


def test_json_object_is_any_object(server: ServerProcess) -> None:
    found = [
        chat(server, response_format={"type": "json_object"}, temperature=1.2, seed=seed, max_tokens=300).choices[0]
        for seed in range(8)
    ]
    complete = [choice.message.content for choice in found if choice.finish_reason == "stop"]
    assert complete, "none came to its end, so this shows nothing"
    assert all(isinstance(json.loads(text), dict) for text in complete)
    assert all(choice.message.content.startswith("{") for choice in found)


def test_text_is_what_it_is_without_a_format(server: ServerProcess) -> None:
    plain, text = chat(server, max_tokens=20), chat(server, max_tokens=20, response_format={"type": "text"})
    assert plain.choices == text.choices


@pytest.mark.parametrize("temperature", [0, 1.1])
def test_streamed_is_not_streamed(server: ServerProcess, temperature: float) -> None:
    asked = {"response_format": json_schema_format(PERSON), "temperature": temperature, "seed": 3}
    [whole] = chat(server, **asked).choices
    chunks = list(chat(server, **asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"
    assert len(chunks) > 10, "it came at once"


def test_choices_go_their_own_ways(server: ServerProcess) -> None:
    choices = chat(server, response_format=json_schema_format(PERSON), n=3, temperature=1.5, seed=1).choices
    made = [json.loads(choice.message.content) for choice in choices]
    for one in made:
        jsonschema.validate(one, PERSON)
    assert made[0] != made[1] != made[2]


def test_the_limit_of_tokens_cuts_it(server: ServerProcess) -> None:
    [choice] = chat(server, response_format=json_schema_format(PERSON), max_tokens=3).choices
    assert choice.finish_reason == "length"
    with pytest.raises(ValueError):
        json.loads(choice.message.content)


def test_log_probabilities_are_the_models_own(server: ServerProcess) -> None:
    [choice] = chat(server, response_format=json_schema_format(FLAGS), logprobs=True, top_logprobs=2).choices
    first = choice.logprobs.content[0]
    assert first.token == "[" and first.token != first.top_logprobs[0].token
    assert first.logprob < first.top_logprobs[0].logprob < 0


def test_constrained_and_free_requests_share_steps_and_not_tokens(server: ServerProcess) -> None:
    """Twelve free ones and twelve with a schema at once: each free answer is the one it gets alone."""
    alone = [complete(server, number) for number in range(12)]

    def constrained(number: int) -> Any:
        schema = list(SCHEMAS.values())[number % 4]
        [choice] = chat(server, response_format=json_schema_format(schema), temperature=number % 3, seed=number).choices
        jsonschema.validate(json.loads(choice.message.content), schema)
        return choice.finish_reason

    with ThreadPoolExecutor(24) as pool:
        free = [pool.submit(complete, server, number) for number in range(12)]
        held = [pool.submit(constrained, number) for number in range(12)]
        assert [future.result() for future in free] == alone
        assert {future.result() for future in held} == {"stop"}
    assert server.metric("recompiles_total") == 0
    assert server.metric("kv_cache_usage_perc") == 0


NESTED: dict[str, Any] = {"type": "string"}
for _ in range(150):
    NESTED = {"type": "array", "items": NESTED}


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "yaml"}, {}, "json", {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}},
        json_schema_format({"type": "strange"}), json_schema_format({"type": "array", "uniqueItems": True}),
        json_schema_format({"$ref": "#/$defs/none"}), json_schema_format({"$ref": "https://example.com/schema.json"}),
        json_schema_format({"type": "object", "properties": {"a": False}, "required": ["a"]}),
        json_schema_format({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        json_schema_format({"type": "string", "pattern": "("}), json_schema_format({"enum": ["x" * MAX_SCHEMA_CHARS]}),
        json_schema_format(NESTED),
    ],
    ids=lambda value: str(value)[:80],
)  # fmt: skip
def test_a_format_that_cannot_be_is_refused(server: ServerProcess, response_format: Any) -> None:
    before = server.metric("prompt_tokens_total")
    with pytest.raises(openai.BadRequestError) as refused:
        chat(server, extra_body={"response_format": response_format})
    assert refused.value.param == "response_format" and len(refused.value.message) < 1000
    assert server.metric("prompt_tokens_total") == before, "the engine was asked"


@pytest.mark.parametrize("asked", [{"min_tokens": 3}, {"ignore_eos": True}], ids=str)
def test_what_would_write_past_the_end_of_the_json_is_refused(server: ServerProcess, asked: dict[str, Any]) -> None:
    for response_format in ({"type": "json_object"}, json_schema_format(PERSON)):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(server, response_format=response_format, extra_body=asked)
        assert [refused.value.param] == list(asked)


HOSTILE: dict[str, dict[str, Any]] = {
    "products": {"allOf": [
        {"anyOf": [{"properties": {f"p{i}_{j}": {"type": "string"}}} for j in range(6)]} for i in range(8)
    ]},
    "ambiguous": {"anyOf": [
        {"type": "array", "items": {"type": "string", "pattern": f"^.*{letter}.{{{count}}}$"}}
        for letter in "abcdefghij" for count in range(5, 15)
    ]},
    "repeats": {"type": "string", "pattern": "^(a{1,1000}b?){1,1000}$"},
    "crossed": {"allOf": [{"type": "string", "pattern": f"^.*{letter}.{{13}}$"} for letter in "abc"]},
    "endless": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}}]}}},
    "wide": {"type": "object", "properties": {f"property{number}": {"type": "string"} for number in range(1000)}},
    "long": {"type": "array", "items": {"type": "integer"}, "minItems": 10**5, "maxItems": 10**6},
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_schema_made_to_hurt_is_answered_or_refused_and_nobody_waits(server: ServerProcess, name: str) -> None:
    """Meanwhile another answer comes, all of it and without a pause."""
    gaps: list[float] = []
    tokens: list[int] = []

    def other() -> None:
        last = time.perf_counter()
        for event in server.client.completions.create(
            model=MODEL, prompt="A list", max_tokens=150, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        ):  # fmt: skip
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()
            tokens.extend([event.usage.completion_tokens] if event.usage else [])

    neighbour = threading.Thread(target=other)
    neighbour.start()
    try:
        [choice] = chat(
            server, response_format=json_schema_format(HOSTILE[name]), temperature=1, seed=0, max_tokens=100
        ).choices
        assert choice.finish_reason in ("stop", "length")
        if choice.finish_reason == "stop":
            json.loads(choice.message.content)
    except openai.BadRequestError as refused:
        assert refused.param == "response_format"
    neighbour.join()
    assert tokens == [150] and max(gaps) < 2, "it stood still"
    assert httpx.get(f"{server.address}/health").status_code == 200


def test_without_the_library_all_else_works(serve: Callable[..., Any]) -> None:
    with serve(script="import sys; sys.modules['llguidance'] = None") as server:
        with pytest.raises(openai.BadRequestError, match=r"pip install 'tcdeploy\[structured\]'") as refused:
            chat(server, response_format={"type": "json_object"})
        assert refused.value.param == "response_format"
        assert chat(server, response_format={"type": "text"}, max_tokens=2).choices[0].message.content


SMALL_PARSER_LIMIT = """
from tcdeploy.server import structured_output as structured
structured.LIMITS["max_items_in_row"] = 60
"""


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_on_its_way_is_an_error_and_no_answer(serve: Callable[..., Any], stream: bool) -> None:
    """The object's first brace opens more rows than the limit."""
    wide = {"type": "object", "properties": {f"property{number}": {"type": "string"} for number in range(200)}}
    with serve(script=SMALL_PARSER_LIMIT) as server:
        with pytest.raises(openai.APIError, match="cannot be kept to its schema") as refused:
            list(chat(server, response_format=json_schema_format(wide), stream=stream, n=2))
        assert refused.value.param == "response_format"
        assert chat(server, response_format=json_schema_format(FLAGS)).choices[0].finish_reason == "stop"
        assert server.metric("num_requests_running") == 0


# Without a server


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from tcdeploy.models.load import resolve_model_path

    return AutoTokenizer.from_pretrained(resolve_model_path(MODEL))


def allowed(position: GrammarMatcher, words: int = 100) -> set[int]:
    masks = numpy.zeros((1, words), dtype=numpy.int32)
    position.masker.fill([(position, 0)], masks)
    return {token for token in range(32 * words) if masks[0, token // 32] >> token % 32 & 1}


def test_the_end_is_allowed_where_the_json_is_whole_and_only_there(tokenizer: Any) -> None:
    structured_output = StructuredOutputBackend(tokenizer, (tokenizer.eos_token_id,))
    grammar = asyncio.run(structured_output.compile_json_schema({"type": "integer"}, "response_format"))
    one, other = grammar.start(), grammar.start()
    assert tokenizer.eos_token_id not in allowed(one)
    [digit] = tokenizer("7", add_special_tokens=False).input_ids
    assert digit in allowed(one) and one.accept(digit) == ""
    assert tokenizer.eos_token_id in allowed(one)
    assert tokenizer.eos_token_id not in allowed(other), "they share a place"
    assert one.accept(tokenizer.eos_token_id) == "stop"
    assert other.accept(tokenizer.eos_token_id) == "error" == other.accept(digit), "it is for good"


def test_white_space_has_an_end(tokenizer: Any) -> None:
    structured_output = StructuredOutputBackend(tokenizer, (tokenizer.eos_token_id,))
    grammar = asyncio.run(structured_output.compile_json_schema({"type": "object"}, "response_format"))
    position, space = grammar.start(), tokenizer(" ", add_special_tokens=False).input_ids[0]
    assert position.accept(tokenizer("{", add_special_tokens=False).input_ids[0]) == ""
    taken = 0
    while space in allowed(position):
        assert position.accept(space) == ""
        taken += 1
    assert 0 < taken <= 40


def test_a_schema_is_compiled_beside_the_event_loop(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    structured_output, threads = StructuredOutputBackend(tokenizer, ()), []
    compile = structured_output._compile
    monkeypatch.setattr(
        structured_output,
        "_compile",
        lambda *given: (threads.append(threading.current_thread().name), compile(*given))[1],
    )
    asyncio.run(structured_output.compile_json_schema(FLAGS, "response_format"))
    assert len(threads) == 1 and threads[0].startswith("grammar")


def test_a_tokenizer_that_the_library_cannot_read_refuses_and_does_not_end_the_server() -> None:
    structured_output = StructuredOutputBackend(object(), (2,))
    with pytest.raises(ApiError, match="tokenizer") as refused:
        asyncio.run(structured_output.compile_json_schema(FLAGS, "response_format"))
    assert (refused.value.status, refused.value.param) == (400, "response_format")
