"""Outputs with a `response_format` follow its JSON schema, and hostile schemas cost other requests nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import numpy
import openai
import pytest
from tokenizers import Tokenizer

from tcdeploy.server.apis.openai.protocol import ApiError, ChatRequest
from tcdeploy.server.apis.openai.validation import check_combinations
from tcdeploy.server.http.request_parsing import parse
from tcdeploy.server.output.structured import structured_output as structured_output_module
from tcdeploy.server.output.structured.json_schema import MAX_PROPERTIES
from tcdeploy.server.output.structured.output_constraint import ConstraintKind, OutputConstraint
from tcdeploy.server.output.structured.structured_output import (
    MAX_CHARS,
    MAX_PATTERN_CHARS,
    MAX_SCHEMA_CHARS,
    GrammarMatcher,
    StructuredOutputBackend,
    _is_lark,
    make_ll_tokenizer,
)
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


def chat(server: ServerProcess, **fields: Any) -> Any:
    return server.client.chat.completions.create(
        **{"model": MODEL, "messages": QUESTION, "max_tokens": 200, "temperature": 0, **fields}
    )


def complete(server: ServerProcess, number: int, **fields: Any) -> str:
    completion = server.client.completions.create(
        model=MODEL,
        prompt=f"The module number {number} provides",
        **{"temperature": 0, "max_tokens": 30, **fields},
    )
    return completion.choices[0].text


@pytest.mark.parametrize("temperature", [0, 0.8, 2])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_the_output_satisfies_its_schema(server: ServerProcess, schema: dict[str, Any], temperature: float) -> None:
    choices = chat(
        server, response_format=json_schema_format(schema), temperature=temperature, seed=0, n=4 if temperature else 1
    ).choices
    for choice in choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)
    text = complete(
        server, 1, max_tokens=200, temperature=temperature, seed=4,
        extra_body={"response_format": json_schema_format(schema)},
    )  # fmt: skip
    jsonschema.validate(json.loads(text), schema)
    assert server.metric("recompiles_total") == 0


def test_json_object_allows_any_object(server: ServerProcess) -> None:
    """With a bias to quotes and braces, so that many outputs reach their end within few tokens."""
    body = {"prompt": '"}', "add_special_tokens": False}
    tokens = httpx.post(f"{server.address}/tokenize", json=body).json()["tokens"]
    fields = {"temperature": 1.2, "max_tokens": 60, "n": 4, "logit_bias": {str(token): 10 for token in tokens}}
    choices = [
        choice
        for seed in (0, 4)
        for choice in chat(server, response_format={"type": "json_object"}, seed=seed, **fields).choices
    ]
    finished = [choice.message.content for choice in choices if choice.finish_reason == "stop"]
    assert finished, "no output reached its end, so nothing was tested"
    assert all(isinstance(json.loads(text), dict) for text in finished)
    assert all(choice.message.content.startswith("{") for choice in choices)


def test_json_object_with_a_schema_follows_it(server: ServerProcess) -> None:
    [choice] = chat(server, extra_body={"response_format": {"type": "json_object", "schema": PERSON}}).choices
    jsonschema.validate(json.loads(choice.message.content), PERSON)


def test_the_text_format_changes_nothing(server: ServerProcess) -> None:
    plain, text = chat(server, max_tokens=20), chat(server, max_tokens=20, response_format={"type": "text"})
    assert plain.choices == text.choices


@pytest.mark.parametrize("temperature", [0, 1.1])
def test_a_streamed_output_equals_the_whole_output(server: ServerProcess, temperature: float) -> None:
    fields = {"response_format": json_schema_format(PERSON), "temperature": temperature, "seed": 3}
    [whole] = chat(server, **fields).choices
    chunks = list(chat(server, **fields, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == whole.finish_reason == "stop"
    assert len(chunks) > 10, "the output was not streamed"


def test_choices_have_separate_grammar_states(server: ServerProcess) -> None:
    choices = chat(server, response_format=json_schema_format(PERSON), n=3, temperature=1.5, seed=1).choices
    persons = [json.loads(choice.message.content) for choice in choices]
    for person in persons:
        jsonschema.validate(person, PERSON)
    assert persons[0] != persons[1] != persons[2]


def test_max_tokens_truncates_the_json(server: ServerProcess) -> None:
    [choice] = chat(server, response_format=json_schema_format(PERSON), max_tokens=3).choices
    assert choice.finish_reason == "length"
    with pytest.raises(ValueError):
        json.loads(choice.message.content)


def test_log_probabilities_are_those_before_the_mask(server: ServerProcess) -> None:
    [choice] = chat(server, response_format=json_schema_format(FLAGS), logprobs=True, top_logprobs=2).choices
    first = choice.logprobs.content[0]
    assert first.token == "[" and first.token != first.top_logprobs[0].token
    assert first.logprob < first.top_logprobs[0].logprob < 0


def test_constrained_requests_do_not_change_free_ones_in_the_same_step(server: ServerProcess) -> None:
    """Eight free requests and twelve with a schema run at once. Each free one gets the same output as alone."""
    alone = [complete(server, number, max_tokens=20) for number in range(8)]

    def complete_constrained(number: int) -> Any:
        schema = list(SCHEMAS.values())[number % 4]
        [choice] = chat(server, response_format=json_schema_format(schema), temperature=number % 3, seed=number).choices
        jsonschema.validate(json.loads(choice.message.content), schema)
        return choice.finish_reason

    with ThreadPoolExecutor(20) as pool:
        free = [pool.submit(complete, server, number, max_tokens=20) for number in range(8)]
        constrained = [pool.submit(complete_constrained, number) for number in range(12)]
        assert [future.result() for future in free] == alone
        assert {future.result() for future in constrained} == {"stop"}
    assert server.metric("recompiles_total") == 0
    assert server.metric("kv_cache_usage_perc") == 0


COLOUR_NAMES = ["red", "dark red", "50 % grey?"]
CONSTRAINTS: dict[str, tuple[dict[str, Any], str]] = {
    "json": ({"structured_outputs": {"json": FLAGS}}, r"\[\s*(true|false)(,\s*(true|false))*\s*\]"),
    "json text": ({"guided_json": json.dumps(FLAGS)}, r"\[\s*(true|false)(,\s*(true|false))*\s*\]"),
    "regex": ({"structured_outputs": {"regex": r"^\d{3}-[ab]{2}$"}}, r"[0-9]{3}-[ab]{2}"),
    "guided_regex": ({"guided_regex": "x{2,4}y", "guided_choice": []}, "x{2,4}y"),
    "choice": ({"structured_outputs": {"choice": COLOUR_NAMES}}, "|".join(map(re.escape, COLOUR_NAMES))),
    "guided_choice": ({"guided_choice": COLOUR_NAMES}, "|".join(map(re.escape, COLOUR_NAMES))),
    "lark": ({"structured_outputs": {"grammar": 'start: "a" B "c"\nB: /[0-9]{2}/'}}, "a[0-9]{2}c"),
    "gbnf": ({"guided_grammar": 'root ::= "a" digit{2} "c"\ndigit ::= [0-9]'}, "a[0-9]{2}c"),
}


@pytest.mark.parametrize(("fields", "pattern"), CONSTRAINTS.values(), ids=CONSTRAINTS)
def test_the_output_follows_the_constraint_of_vllms_fields(
    server: ServerProcess, fields: dict[str, Any], pattern: str
) -> None:
    choices = chat(server, extra_body=fields, temperature=1, seed=0, n=2).choices
    assert [choice.finish_reason for choice in choices] == ["stop"] * 2
    texts = [choice.message.content for choice in choices]
    texts.append(complete(server, 1, max_tokens=100, extra_body=fields))
    assert all(re.fullmatch(pattern, text) for text in texts), texts


def test_the_characters_of_schemas_are_counted_before_they_are_written_as_json() -> None:
    backend, half = StructuredOutputBackend(None, ()), {"enum": ["x" * (MAX_SCHEMA_CHARS // 2)]}
    backend.check_size([half], "tools")
    with pytest.raises(ApiError, match="the schema has 131080 characters") as rejection:
        backend.check_size([half, half], "tools")
    assert rejection.value.param == "tools"


NESTED: dict[str, Any] = {"type": "string"}
for _ in range(150):
    NESTED = {"type": "array", "items": NESTED}


@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "yaml"}, {}, "json", {"type": "json_schema"}, {"type": "json_schema", "json_schema": {"name": "x"}},
        json_schema_format({"type": "strange"}), json_schema_format({"const": 2**53 + 1}),
        json_schema_format({"const": -(2**63)}), {"type": "json_object", "schema": {"multipleOf": 1000003}},
        json_schema_format({"$ref": "#/$defs/none"}), json_schema_format({"$ref": "https://example.com/schema.json"}),
        json_schema_format({"type": "object", "properties": {"a": False}, "required": ["a"]}),
        json_schema_format({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        json_schema_format({"type": "string", "pattern": "("}), json_schema_format({"enum": ["x" * MAX_SCHEMA_CHARS]}),
        json_schema_format({"items": {"properties": {f"k{number}": {} for number in range(MAX_PROPERTIES + 1)}}}),
        json_schema_format(NESTED),
    ],
    ids=lambda value: str(value)[:80],
)  # fmt: skip
def test_an_unsupported_format_is_rejected(server: ServerProcess, response_format: Any) -> None:
    before = server.metric("prompt_tokens_total")
    with pytest.raises(openai.BadRequestError) as rejection:
        chat(server, extra_body={"response_format": response_format})
    assert rejection.value.param == "response_format" and len(rejection.value.message) < 1000
    assert server.metric("prompt_tokens_total") == before, "the engine got the prompt"


@pytest.mark.parametrize("fields", [{"min_tokens": 3}, {"ignore_eos": True}], ids=str)
def test_fields_that_continue_after_the_json_are_rejected(server: ServerProcess, fields: dict[str, Any]) -> None:
    for response_format in ({"type": "json_object"}, json_schema_format(PERSON)):
        with pytest.raises(openai.BadRequestError) as rejection:
            chat(server, response_format=response_format, extra_body=fields)
        assert [rejection.value.param] == list(fields)


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
def test_a_hostile_schema_is_served_or_rejected_and_does_not_delay_others(server: ServerProcess, name: str) -> None:
    """Another stream runs meanwhile. It is complete and has no gap of two seconds."""
    times: list[float] = []  # of the stream's events
    tokens: list[int] = []
    has_begun = threading.Event()

    def stream_other() -> None:
        for event in server.client.completions.create(
            model=MODEL, prompt="A list", max_tokens=300, temperature=0, stream=True,
            stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
        ):  # fmt: skip
            times.append(time.perf_counter())
            has_begun.set()
            tokens.extend([event.usage.completion_tokens] if event.usage else [])

    streaming = threading.Thread(target=stream_other)
    streaming.start()
    assert has_begun.wait(60)
    try:
        [choice] = chat(
            server, response_format=json_schema_format(HOSTILE[name]), temperature=1, seed=0, max_tokens=60
        ).choices
        assert choice.finish_reason in ("stop", "length")
        if choice.finish_reason == "stop":
            json.loads(choice.message.content)
    except openai.BadRequestError as rejection:
        assert rejection.param == "response_format"
    streaming.join()
    assert tokens == [300] and max(after - before for before, after in itertools.pairwise(times)) < 2
    assert httpx.get(f"{server.address}/health").status_code == 200


def test_without_llguidance_everything_else_works(serve: Callable[..., Any]) -> None:
    with serve(script="import sys; sys.modules['llguidance'] = None") as server:
        with pytest.raises(openai.BadRequestError, match="install the extra `structured`") as rejection:
            chat(server, response_format={"type": "json_object"})
        assert rejection.value.param == "response_format"
        assert chat(server, response_format={"type": "text"}, max_tokens=2).choices[0].message.content


SMALL_PARSER_LIMIT = """
from tcdeploy.server.output.structured import structured_output
structured_output.PARSER_LIMITS["max_items_in_row"] = 60
"""


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_that_fails_during_generation_is_an_error(serve: Callable[..., Any], stream: bool) -> None:
    """The object's first brace needs more parser rows than the limit."""
    wide = {"type": "object", "properties": {f"property{number}": {"type": "string"} for number in range(200)}}
    with serve(script=SMALL_PARSER_LIMIT) as server:
        with pytest.raises(openai.APIError, match="cannot follow its schema") as rejection:
            list(chat(server, response_format=json_schema_format(wide), stream=stream, n=2))
        assert rejection.value.param == "response_format"
        assert chat(server, response_format=json_schema_format(FLAGS)).choices[0].finish_reason == "stop"
        assert server.metric("num_requests_running") == 0


# Unit tests


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from tcdeploy.models.load import resolve_model_path

    return AutoTokenizer.from_pretrained(resolve_model_path(MODEL))


def allowed_tokens(matcher: GrammarMatcher, words: int = 100) -> set[int]:
    masks = numpy.zeros((1, words), dtype=numpy.int32)
    matcher.masker.fill([(matcher, 0)], masks)
    return {token for token in range(32 * words) if masks[0, token // 32] >> token % 32 & 1}


def test_eos_is_allowed_only_where_the_json_is_complete(tokenizer: Any) -> None:
    structured_output = StructuredOutputBackend(tokenizer, (tokenizer.eos_token_id,))
    grammar = asyncio.run(structured_output.compile_json_schema({"type": "integer"}, "response_format"))
    first, second = grammar.start(), grammar.start()
    assert tokenizer.eos_token_id not in allowed_tokens(first)
    [digit] = tokenizer("7", add_special_tokens=False).input_ids
    assert digit in allowed_tokens(first) and first.accept(digit) == ""
    assert tokenizer.eos_token_id in allowed_tokens(first)
    assert tokenizer.eos_token_id not in allowed_tokens(second), "matchers share state"
    assert first.accept(tokenizer.eos_token_id) == "stop"
    assert second.accept(tokenizer.eos_token_id) == "error" == second.accept(digit), "errors are permanent"


def test_a_tokenizer_is_copied_only_to_drop_its_truncation(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copies: list[Any] = []
    copy_object = structured_output_module.copy.copy
    monkeypatch.setattr(structured_output_module.copy, "copy", lambda item: copies.append(item) or copy_object(item))
    owner = SimpleNamespace(backend_tokenizer=backend)
    text = "a b c d e f"
    whole = make_ll_tokenizer(owner, (2,)).tokenize_str(text)
    assert copies == [] and len(whole) > 3
    backend.enable_truncation(3)
    assert make_ll_tokenizer(owner, (2,)).tokenize_str(text) == whole
    assert copies == [backend] and backend.truncation["max_length"] == 3


def test_white_space_is_limited(tokenizer: Any) -> None:
    structured_output = StructuredOutputBackend(tokenizer, (tokenizer.eos_token_id,))
    grammar = asyncio.run(structured_output.compile_json_schema({"type": "object"}, "response_format"))
    matcher, space = grammar.start(), tokenizer(" ", add_special_tokens=False).input_ids[0]
    assert matcher.accept(tokenizer("{", add_special_tokens=False).input_ids[0]) == ""
    length = 0
    while space in allowed_tokens(matcher):
        assert matcher.accept(space) == ""
        length += 1
    assert 0 < length <= 40


def test_a_schema_is_compiled_in_a_thread(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    structured_output, threads = StructuredOutputBackend(tokenizer, ()), []
    compile = structured_output._compile
    monkeypatch.setattr(
        structured_output,
        "_compile",
        lambda *arguments: (threads.append(threading.current_thread().name), compile(*arguments))[1],
    )
    asyncio.run(structured_output.compile_json_schema(FLAGS, "response_format"))
    assert len(threads) == 1 and threads[0].startswith("grammar")


def test_tables_are_built_once_also_if_a_request_that_waits_for_them_is_cancelled(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    structured_output = StructuredOutputBackend(tokenizer, (tokenizer.eos_token_id,))
    may_build, builds = threading.Event(), []

    def build(*arguments: Any) -> Any:
        may_build.wait()
        builds.append(threading.current_thread().name)
        return make_ll_tokenizer(*arguments)

    monkeypatch.setattr(structured_output_module, "make_ll_tokenizer", build)

    async def request_twice() -> GrammarMatcher:
        cancelled = asyncio.create_task(structured_output.compile_json_schema(FLAGS, "response_format"))
        waiting = asyncio.create_task(structured_output.compile_json_schema(FLAGS, "response_format"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        may_build.set()
        return (await waiting).start()

    assert structured_output.needs_tables
    assert allowed_tokens(asyncio.run(request_twice()))
    assert len(builds) == 1 and builds[0].startswith("grammar") and not structured_output.needs_tables


CLOCK = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_regex": "a", "guided_json": {}, "guided_choice": ["a"]}, "guided_choice",
         "guided_choice (choice) cannot be combined with guided_regex (regex)"),
        ({"structured_outputs": {"regex": "a", "grammar": "a"}}, "structured_outputs", "cannot be combined"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex",
         "cannot be combined with response_format (json)"),
        ({"structured_outputs": {}}, "structured_outputs", "must contain one of json, json_object, regex"),
        ({"structured_outputs": {"regex": "a"}, "tools": [CLOCK]}, "structured_outputs", "combined with tools"),
        ({"guided_choice": ["a"], "tools": [CLOCK], "tool_choice": "required"}, "guided_choice", "combined with tools"),
        ({"guided_choice": ["a"], "min_tokens": 2}, "min_tokens", "cannot be combined with guided_choice"),
        ({"guided_choice": "a"}, "guided_choice", "list"), ({"guided_regex": 5}, "guided_regex", "string"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "structured_outputs", "1024"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format", "json_schema"),
    ],
    ids=str,
)  # fmt: skip
def test_combined_and_malformed_constraints_are_rejected(fields: dict[str, Any], param: str, message: str) -> None:
    body = {"messages": QUESTION, **fields}
    with pytest.raises(ApiError) as rejection:
        check_combinations(parse(ChatRequest, json.dumps(body).encode()))
    assert (rejection.value.status, rejection.value.param) == (400, param) and message in rejection.value.message


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("regex", "(", "the regex in guided cannot be used: .*unclosed group"),
        ("regex", r"a(?=b)", "look-around"), ("regex", "", "is empty"),
        ("regex", "a" * (MAX_CHARS["regex"] + 1), "limit"),
        ("choice", [], "is empty"), ("choice", ["a", ""], "empty string"),
        ("choice", ["a" * MAX_CHARS["choice"], "b"], "limit"), ("grammar", "start: b", "unknown name"),
        ("regex", "(.*)" * 2000, "lexer precomputation failed"),
        ("grammar", "start: A12\nA0: /.*x?/\n" + "\n".join(f"A{i + 1}: A{i} A{i}" for i in range(12)), "too big"),
        ("json", json.dumps({"items": {"pattern": "a" * (MAX_PATTERN_CHARS + 1)}}), "regexes .* are too long"),
        ("json", json.dumps({"anyOf": [{"patternProperties": {f"{i:04000}": {}}} for i in range(9)]}), "too long"),
        ("json", '{"patternProperties": 5, "pattern": {"pattern": []}}', "cannot be used"),
        ("grammar", "list = a", "Lark with a rule `start`, or GBNF with a rule `root`"),
        ("grammar", 'root ::= "a\\', "GBNF"), ("grammar", "root ::= " + "(" * 2000, "recursion"),
        ("grammar", "start: " + "(" * 9000, "nested"), ("json", "[1]", "not a JSON object"),
        ("json", "{", "cannot be used"), ("json", "[" * 1000, "recursion"),
        ("json", " " * (MAX_SCHEMA_CHARS + 1), "limit"), ("json", '{"type": "strange"}', "cannot be used"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_an_invalid_constraint_is_rejected_with_its_reason(
    tokenizer: Any, kind: ConstraintKind, value: Any, message: str
) -> None:
    structured_output = StructuredOutputBackend(tokenizer, (tokenizer.eos_token_id,))
    with pytest.raises(ApiError, match=message) as rejection:
        asyncio.run(structured_output.compile(OutputConstraint(kind, value, "guided")))
    assert (rejection.value.status, rejection.value.param) == (400, "guided")
    assert len(rejection.value.message) < 700 and "\n" not in rejection.value.message


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "a{1000000}"), ("regex", "(((a{100}){100}){100}){100}"),
        ("grammar", 'start: x{1000}\nx: y{1000}\ny: z{1000}\nz: "a"?'), ("grammar", 'start: "a"{1000000}'),
    ],
)  # fmt: skip
def test_a_hostile_constraint_ends_with_an_error_after_few_tokens(
    tokenizer: Any, kind: ConstraintKind, value: str
) -> None:
    """With the limits for schemas, each of these runs for seconds or takes 100 MB."""
    structured_output = StructuredOutputBackend(tokenizer, (tokenizer.eos_token_id,))
    matcher = asyncio.run(structured_output.compile(OutputConstraint(kind, value, "guided"))).start()
    [letter] = tokenizer("a", add_special_tokens=False).input_ids
    statuses = [matcher.accept(letter) for _ in range(40) if allowed_tokens(matcher)]
    assert statuses[-1] == "error", "a limit was not enforced"


def test_the_syntax_of_a_grammar_is_found_without_a_slow_regex() -> None:
    for grammar in ('start: "a"', '\n  start : "a"', "%llguidance {}\na", 'a: "b"\nstart.1: a'):
        assert _is_lark(grammar)
    for grammar in ('root ::= start\nstart ::= "a"', 'root ::= "start: b"', "restart: a", "\n" * 30_000):
        assert not _is_lark(grammar)


def test_choices_are_literal_texts(tokenizer: Any) -> None:
    structured_output = StructuredOutputBackend(tokenizer, (tokenizer.eos_token_id,))
    choices = ["a.c", "a", "\\d|(x", '/x/\n\t"', "é日\x00"]
    grammar = asyncio.run(structured_output.compile(OutputConstraint("choice", choices, "guided")))

    def is_accepted(text: str) -> bool:
        matcher = grammar.start()
        ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        return [matcher.accept(token_id) for token_id in ids][-1] == "stop"

    assert all(map(is_accepted, choices))
    assert not any(map(is_accepted, ["abc", "5", "a.", "x", "", "é日"]))


def test_an_unsupported_tokenizer_rejects_schemas_and_does_not_stop_the_server() -> None:
    structured_output = StructuredOutputBackend(object(), (2,))
    with pytest.raises(ApiError, match="tokenizer") as rejection:
        asyncio.run(structured_output.compile_json_schema(FLAGS, "response_format"))
    assert (rejection.value.status, rejection.value.param) == (400, "response_format")
