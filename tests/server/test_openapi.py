"""/openapi.json describes the server: it has all limits of requests, and generated requests find no difference.

schemathesis compares each response with the document: status, content type, headers, body and events of streams.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from tcdeploy.server.api import REQUEST_MODELS, make_app
from tcdeploy.server.apis.openai.protocol import ApiError, ChatRequest, CompletionRequest
from tcdeploy.server.apis.openai.validation import ModelLimits, check_combinations, to_sampling_params
from tcdeploy.server.http.openapi import openapi_document
from tcdeploy.server.http.request_parsing import parse
from tests.fork_server import ForkServer
from tests.server.conftest import ServerProcess, serving
from tests.server.test_api import loading_state
from tests.server.test_tools import make_model

# Mode of generation, examples per operation in the fuzzing phase, and cases of all phases, at least. "positive": only
# valid requests, with the limits of every field. The tests below refuse values beyond those of completions and chats.
RUNS = [("positive", 4, 900), pytest.param("all", 15, 2_500, marks=pytest.mark.long)]
# 400: combinations of fields, and what depends on the model's context and chat template, are not in the document.
CONFIGURATION = """
[checks]
positive_data_acceptance.expected-statuses = ["2xx", "400", "404", "503"]
negative_data_rejection.expected-statuses = ["400", "404", "413", "503"]
"""


@pytest.fixture(scope="module")
def short_server(
    tmp_path_factory: pytest.TempPathFactory, warm_cache: Path, fork_server: ForkServer
) -> Iterator[ServerProcess]:
    """Its model supports tools, and generates few tokens unless a request asks for more."""
    home = tmp_path_factory.mktemp("short")
    folder = make_model(home / "model")
    path = folder / "generation_config.json"
    values = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**values, "max_new_tokens": 2}))
    with serving(home, warm_cache, model=str(folder), fork_server=fork_server) as server:
        yield server


@pytest.mark.parametrize(("mode", "examples", "min_cases"), RUNS)
def test_generated_requests_find_no_difference_from_the_document(
    mode: str, examples: int, min_cases: int, short_server: ServerProcess, tmp_path: Path
) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIGURATION)
    st = Path(sys.executable).parent / "st"
    completed = subprocess.run(
        [
            st, "run", f"{short_server.address}/openapi.json", "--phases", "coverage,fuzzing,stateful", "--mode", mode,
            "--max-examples", str(examples), "--generation-deterministic", "--suppress-health-check", "all",
            "--no-color", "--workers", "1", "--request-timeout", "60",
            "--report", "json", "--report-json-path", str(tmp_path / "report.json"),
        ],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stdout[-4000:]
    cases = json.loads((tmp_path / "report.json").read_text())["test_cases"]
    assert cases["generated"] >= min_cases and not cases["with_failures"] and not cases["errored"], cases
    assert httpx.get(f"{short_server.address}/health").status_code == 200
    assert short_server.metric("recompiles_total") == 0


VOCAB_SIZE = 100
LIMITS = ModelLimits(1_000_000, VOCAB_SIZE)
TOKEN_ID = {"type": "integer", "minimum": 0, "maximum": VOCAB_SIZE - 1}
REQUIRED = {"top_logprobs": {"logprobs": True}, "max_tokens": {"echo": True}}  # by the lowest values of other fields
IGNORED = {"messages", "tokens", "tools", "prompt", "logit_bias"}  # tested below


def _is_accepted(request_type: type[CompletionRequest | ChatRequest], fields: dict[str, Any]) -> bool:
    start = {"messages": [{"role": "user", "content": "a"}]} if request_type is ChatRequest else {"prompt": [1]}
    try:
        request = parse(request_type, json.dumps({**start, **fields}).encode())
        check_combinations(request)
        to_sampling_params(request, 1, LIMITS)
    except ApiError as error:
        assert error.status == 400 and error.body["error"]["param"] in fields, error.message
        return False
    return True


def _limits_of(schema: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Pairs of an accepted value at a limit of the schema, and a refused one beyond it."""
    for option in schema.get("anyOf", [schema]):
        tiny = 1 if option.get("type") == "integer" else 1e-9
        for keyword, sign in (("minimum", -1), ("maximum", 1)):
            if keyword in option:
                yield option[keyword], option[keyword] + sign * tiny
        if option.get("type") == "number" and "exclusiveMinimum" in option:
            yield option["exclusiveMinimum"] + 1e-9, option["exclusiveMinimum"]
        if option.get("type") == "number" and "exclusiveMaximum" in option:
            yield option["exclusiveMaximum"] - 1e-9, option["exclusiveMaximum"]
        if "minLength" in option:
            yield "a", ""
        if "maxLength" in option:
            yield "a" * option["maxLength"], "a" * (option["maxLength"] + 1)
        if option.get("type") == "array" and "maxItems" in option:
            items = TOKEN_ID if "$ref" in option["items"] else option["items"]
            item = 1 if items["type"] == "integer" else "a"
            yield [item] * option["maxItems"], [item] * (option["maxItems"] + 1)
            for value, beyond in _limits_of(items):
                yield [value], [beyond]


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    document = openapi_document([], REQUEST_MODELS, None, VOCAB_SIZE)
    return document["components"]["schemas"]


@pytest.mark.parametrize("request_type", [CompletionRequest, ChatRequest])
def test_documented_limits_are_those_of_the_code(
    request_type: type[CompletionRequest | ChatRequest], schemas: dict[str, Any]
) -> None:
    checked = set()
    for name, schema in schemas[request_type.__name__]["properties"].items():
        for accepted, refused in _limits_of(schema) if name not in IGNORED else ():
            others = REQUIRED.get(name, {}) if request_type is CompletionRequest or name != "max_tokens" else {}
            assert _is_accepted(request_type, {**others, name: accepted}), (name, accepted)
            assert not _is_accepted(request_type, {**others, name: refused}), (name, refused)
            checked.add(name)
    own = {"logprobs"} if request_type is CompletionRequest else {"top_logprobs", "max_completion_tokens"}
    assert checked == own | {
        "n", "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed",
        "presence_penalty", "frequency_penalty", "prompt_logprobs", "stop", "stop_token_ids", "bad_words",
        "truncate_prompt_tokens", "guided_choice",
    }  # fmt: skip


def test_limits_of_nested_values_are_documented(schemas: dict[str, Any]) -> None:
    completion = schemas["CompletionRequest"]["properties"]
    biases = completion["logit_bias"]["anyOf"][0]
    value = {"type": "number", "minimum": -100, "maximum": 100}
    assert (biases["patternProperties"], biases["additionalProperties"]) == ({"^[0-9]{1,10}$": value}, False)
    assert biases["maxProperties"] == 512
    for value, is_accepted in ((-100, True), (100, True), (-100.5, False), (101, False)):
        assert _is_accepted(CompletionRequest, {"logit_bias": {"1": value}}) is is_accepted
    assert schemas["TokenId"] == TOKEN_ID
    items = [option.get("items") for option in completion["prompt"]["anyOf"]]
    token_id = {"$ref": "#/components/schemas/TokenId"}
    assert items[:3] == [None, token_id, {"type": "string"}] and items[3]["items"] == token_id
    assert all(option["minItems"] == 1 for option in completion["prompt"]["anyOf"][1:])
    assert schemas["ChatRequest"]["properties"]["messages"]["minItems"] == 1


def test_each_route_documents_its_successful_response() -> None:
    document = asyncio.run(_get_document())
    without_body = {"/health"}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            assert ("content" in responses["200"]) is (path not in without_body), path
            for response in responses.values():
                for content in response.get("content", {}).values():
                    jsonschema.Draft202012Validator.check_schema(content["schema"])


def test_links_name_operations_and_their_parameters() -> None:
    document = asyncio.run(_get_document())
    operations = {
        operation["operationId"]: operation for path in document["paths"].values() for operation in path.values()
    }
    links = {
        (name, link["operationId"]): set(link["parameters"])
        for name, operation in operations.items()
        for link in operation["responses"]["200"].get("links", {}).values()
    }
    assert links.keys() == {
        ("models", "model"), ("responses", "retrieve_response"), ("responses", "delete_response"),
    }  # fmt: skip
    for (_, target), parameters in links.items():
        assert parameters == {parameter["name"] for parameter in operations[target]["parameters"]}


def test_the_document_names_the_paths_that_need_a_key() -> None:
    with_keys = asyncio.run(_get_document(api_keys=("secret",)))
    public = {
        path for path, operations in with_keys["paths"].items() if "security" not in operations.get("get", {"security"})
    }
    assert public == {"/", "/docs", "/health", "/ready"}
    assert with_keys["components"]["securitySchemes"] == {"apiKey": {"type": "http", "scheme": "bearer"}}
    assert "securitySchemes" not in asyncio.run(_get_document())["components"]


async def _get_document(**settings: Any) -> dict[str, Any]:
    app = make_app(loading_state(**settings))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        response = await client.get("/openapi.json", headers={"authorization": "Bearer secret"})
        return response.json()
