"""A model folder with a generation_config.json, served and run by `generate`: its values replace those left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tcdeploy.models.load import resolve_model_path
from tests.conftest import TINY, TINY_FLAGS, RunCLI
from tests.fork_server import ForkServer
from tests.server.conftest import ServerProcess, serving

PROMPT = [40, 41, 42, 43]
TEXT_PROMPT = "This module provides"
MAX_NEW_TOKENS = 6


@pytest.fixture(scope="module")
def greedy(reference_tiny: Any) -> list[int]:
    """The most likely continuation of PROMPT."""
    ids = torch.tensor([PROMPT])
    output = reference_tiny.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return list(output[0, len(PROMPT) :].tolist())


def save_model(folder: Path, values: dict[str, Any], eos_token: str = "") -> str:
    """A copy of the embedded model with this generation_config.json, and with another `eos_token` of the tokenizer."""
    shutil.copytree(resolve_model_path(TINY), folder)
    (folder / "generation_config.json").write_text(json.dumps(values))
    if eos_token:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token": eos_token}))
    return str(folder)


@pytest.fixture(scope="module")
def sampling_server(
    tmp_path_factory: pytest.TempPathFactory, warm_cache: Path, fork_server: ForkServer, greedy: list[int]
) -> Iterator[ServerProcess]:
    """Its model has a high temperature, which only its top_k of 1 makes greedy, and two end-of-sequence ids."""
    home = tmp_path_factory.mktemp("generation")
    values = {
        "do_sample": True, "temperature": 50.0, "top_k": 1, "max_new_tokens": MAX_NEW_TOKENS,
        "eos_token_id": [2, greedy[3]],
    }  # fmt: skip
    with serving(home, warm_cache, model=save_model(home / "model", values), fork_server=fork_server) as server:
        yield server


def complete(server: ServerProcess, **fields: Any) -> tuple[str, str]:
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 3, **fields}
    response = httpx.post(f"{server.address}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["text"], choice["finish_reason"]


def test_parameters_that_a_request_leaves_out_are_those_of_the_model(sampling_server: ServerProcess) -> None:
    greedy_text = complete(sampling_server, temperature=0, top_k=0, ignore_eos=True)
    assert complete(sampling_server, ignore_eos=True) == greedy_text
    assert complete(sampling_server, ignore_eos=True, top_k=None, temperature=None) == greedy_text, "null is left out"


def test_a_value_of_the_request_replaces_that_of_the_model(sampling_server: ServerProcess) -> None:
    texts = {complete(sampling_server, ignore_eos=True, top_k=0, seed=seed) for seed in range(3)}
    assert len(texts) == 3, "a temperature of 50 without top_k did not sample"


def test_each_end_of_sequence_id_ends_a_request(sampling_server: ServerProcess, greedy: list[int]) -> None:
    text, finish_reason = complete(sampling_server)
    whole, _ = complete(sampling_server, ignore_eos=True)
    assert finish_reason == "stop" and whole.startswith(text) and len(text) < len(whole)


def test_the_models_length_limits_chats_but_not_requests_that_have_their_own(sampling_server: ServerProcess) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
    url = f"{sampling_server.address}/v1/chat/completions"
    for field, expected in (({}, MAX_NEW_TOKENS), ({"max_tokens": 9}, 9)):
        usage = httpx.post(url, json={**body, **field}, timeout=60).json()["usage"]
        assert usage["completion_tokens"] == expected
    usage = httpx.post(
        f"{sampling_server.address}/v1/completions", json={"prompt": PROMPT, "ignore_eos": True}, timeout=60
    ).json()["usage"]
    assert usage["completion_tokens"] == MAX_NEW_TOKENS, "the API's default of 16 is lowered"


def test_status_shows_the_defaults(sampling_server: ServerProcess, greedy: list[int]) -> None:
    status = httpx.get(f"{sampling_server.address}/status").json()
    assert status["generation_defaults"] == {
        "temperature": 50.0, "top_k": 1, "max_new_tokens": MAX_NEW_TOKENS, "stop_token_ids": [2, greedy[3]],
    }  # fmt: skip


def continue_greedily(reference_tiny: Any) -> tuple[Any, list[int]]:
    """The embedded model's tokenizer, and the eight tokens with which transformers continues TEXT_PROMPT."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path(TINY))
    ids = tokenizer(TEXT_PROMPT, return_tensors="pt")
    output = reference_tiny.generate(**ids, max_new_tokens=8, do_sample=False)
    return tokenizer, output[0, ids.input_ids.shape[1] :].tolist()


def test_generate_uses_them_and_its_flags_replace_them(
    run_cli: RunCLI, tmp_path: Path, warm_cache: Path, reference_tiny: Any
) -> None:
    tokenizer, tokens = continue_greedily(reference_tiny)
    assert tokens[5] not in tokens[:5]
    values = {"temperature": 50.0, "top_k": 1, "max_new_tokens": 8, "eos_token_id": [2, tokens[5]]}
    folder = save_model(tmp_path / "model", values)

    def generate(*flags: str) -> str:
        result = run_cli("generate", folder, TEXT_PROMPT, *TINY_FLAGS, "--cache-dir", str(warm_cache), *flags)
        assert result.returncode == 0, result.stderr
        return str(result.stdout)

    text = tokenizer.decode(tokens[:6], skip_special_tokens=True)
    assert generate("--max-new-tokens", "3") == tokenizer.decode(tokens[:3], skip_special_tokens=True) + "\n"
    assert generate("--top-k", "0", "--seed", "1") != text + "\n"
    assert generate("--generation-config", "none") == text + "\n", "greedy, with the end-of-sequence ids of the file"
    document = json.loads(generate("--json"))
    assert (document["command"], document["text"], document["token_ids"]) == ("generate", text, tokens[:6])
    assert (document["output_tokens"], document["finish_reason"]) == (6, "stop")
    assert document["plan"]["model"] == folder and len(document["buckets"]) == 4


def test_serve_stops_at_the_end_of_sequence_token_of_the_tokenizer(
    tmp_path: Path, warm_cache: Path, fork_server: ForkServer, greedy: list[int]
) -> None:
    """Fine-tuned chat models often set the end of a turn only in tokenizer_config.json."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model_path(TINY))
    assert greedy[3] not in greedy[:3]
    eos_token = tokenizer.convert_ids_to_tokens(greedy[3])
    folder = save_model(tmp_path / "model", {"eos_token_id": 2, "do_sample": False}, eos_token)
    with serving(tmp_path, warm_cache, model=folder, fork_server=fork_server) as server:
        text, finish_reason = complete(server)
        assert finish_reason == "stop" and text == tokenizer.decode(greedy[:3])
        assert complete(server, ignore_eos=True)[1] == "length"
        status = httpx.get(f"{server.address}/status").json()
        assert status["generation_defaults"]["stop_token_ids"] == [2, greedy[3]]


def test_generate_stops_at_the_end_of_sequence_token_of_the_tokenizer(
    run_cli: RunCLI, tmp_path: Path, warm_cache: Path, reference_tiny: Any
) -> None:
    tokenizer, tokens = continue_greedily(reference_tiny)
    folder = save_model(tmp_path / "model", {"eos_token_id": 2}, tokenizer.convert_ids_to_tokens(tokens[5]))
    flags = (*TINY_FLAGS, "--cache-dir", str(warm_cache), "--max-new-tokens", "8")
    for source in ("model", "none"):
        result = run_cli("generate", folder, TEXT_PROMPT, *flags, "--generation-config", source)
        assert result.returncode == 0, result.stderr
        assert result.stdout == tokenizer.decode(tokens[:5]) + "\n"


def test_a_broken_file_is_refused_at_the_start(run_cli: RunCLI, tmp_path: Path, warm_cache: Path) -> None:
    folder = save_model(tmp_path / "model", {"temperature": -1})
    flags = (*TINY_FLAGS, "--cache-dir", str(warm_cache))
    for command in (("serve", folder, "--port", "0"), ("generate", folder, "x"), ("compile", folder, "--dry-run")):
        result = run_cli(*command, *flags)
        assert result.returncode == 1 and "Traceback" not in result.stderr
        assert f"error: {folder}/generation_config.json: temperature is -1; it must be a number, 0 or more" in (
            result.stderr
        )
        assert "hint: correct the file, or use --generation-config none" in result.stderr
    assert run_cli("compile", folder, "--dry-run", *flags, "--generation-config", "none").returncode == 0
