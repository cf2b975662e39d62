"""Starts from ahead-of-time packages alone: what they import, which tokens they give, and when they are refused."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import json
import logging
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import tcdeploy
from tcdeploy.cache.files.records import FileRecord, hash_files
from tcdeploy.cache.folder.access import make_private_folder
from tcdeploy.cache.folder.layout import manifest_path
from tcdeploy.cache.record.manifest import read_manifest, read_manifests, write_manifest
from tcdeploy.cache.staging.folder import create_staging_folder
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.engine.schedule.step_costs import parse_step_costs
from tcdeploy.engine.warm import warmup
from tcdeploy.errors import IntegrityError, MismatchError, TcdeployError, TrustError, UsageError
from tcdeploy.models import sources
from tcdeploy.models.location import BUILTIN_MODELS
from tcdeploy.models.sources import changed_sources, digest_sources, record_executed_files
from tcdeploy.models.weights import reader as checkpoint_reader
from tcdeploy.models.weights import sources as weight_sources
from tcdeploy.models.weights.reader import ReadTotal
from tcdeploy.models.weights.sources import LoadingWeights
from tcdeploy.planning import extras
from tcdeploy.planning.installation import install_command
from tcdeploy.planning.recipe import Recipe
from tcdeploy.programs import packages
from tcdeploy.programs.step_program import StepProgram, parse_step_program
from tcdeploy.start import loaded_start
from tcdeploy.start import packages as packaged_start
from tcdeploy.start.planned import StartRequest
from tcdeploy.start.prepare import prepare
from tcdeploy.start.record import lookup as record_lookup
from tcdeploy.start.record.factors import StartFactors
from tcdeploy.start.record.record import WITHOUT_TOKENIZER
from tcdeploy.text import tokenizer as tokenizer_module
from tcdeploy.torch_compat.triton.cuda_driver import DriverError
from tests.conftest import PACKAGES, ROOT, TINY, RunCLI, cli_command, cli_environment, prepare_tiny
from tests.engine_loop import generate_tokens
from tests.fork_server import HAS_GPU
from tests.linked_packages import create_environment
from tests.server.test_tools import CLOCK, QUESTION, make_model

BUCKETS: dict[str, Any] = {"buckets": (32,), "batch_sizes": (4,)}
FLAGS = ("--buckets", "32", "--batch-sizes", "4", "--programs", "aot")
PROMPT = list(range(40, 60))
ABSENT_WITH_TOKENIZER = ("transformers", "torch._dynamo", "torch._inductor", "triton", "sympy")
ABSENT = (*ABSENT_WITH_TOKENIZER, "tokenizers", "huggingface_hub")
SCRIPT = f"""
import json, sys
sys.path[:0] = {PACKAGES.split(":")!r}
from tcdeploy import Recipe, SamplingParams, prepare
from tests.engine_loop import generate_tokens

model, cache = sys.argv[1:]
deployment = prepare(Recipe(model=model, programs="aot", buckets=(32,), batch_sizes=(4,), cache_dir=cache))
tokens = generate_tokens(deployment.engine, [{PROMPT}], SamplingParams(max_tokens=12))
outcomes = [(record.outcome, record.compiles) for record in deployment.records]
print(json.dumps([tokens[0], outcomes, sorted(set(sys.modules) & set({ABSENT!r}))]))
"""


def aot_recipe(cache_dir: str, model: str = TINY) -> Recipe:
    return Recipe(model=model, programs="aot", cache_dir=cache_dir, **BUCKETS)


def start(cache_dir: str, model: str = TINY) -> Any:
    return packaged_start.start_from_packages(StartRequest(aot_recipe(cache_dir, model)))


@pytest.fixture(scope="module")
def cache(cache_dir: str, filled_packages: Path) -> Iterator[str]:
    """A folder with the packages of the embedded model, and the record of the start that compiled them.

    The programs of torch.compile that other tests of this process use are in the same folder.
    """
    shutil.copytree(filled_packages, cache_dir, dirs_exist_ok=True)
    prepare(aot_recipe(cache_dir))
    yield cache_dir


@pytest.fixture
def own_cache(cache: str, tmp_path: Path) -> str:
    """A copy that a test may change."""
    folders = shutil.ignore_patterns(".start-*", "leases", "precompiled_headers")
    return str(shutil.copytree(cache, tmp_path / "cache", ignore=folders))


def transformers_tokens(model: Any) -> list[int]:
    return greedy_tokens(model, PROMPT)


def greedy_tokens(model: Any, prompt: Sequence[int], count: int = 12) -> list[int]:
    ids = torch.tensor([prompt])
    for _ in range(count):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def run_script(cache_dir: str, model: str = TINY) -> Any:
    """In a new process without HOME, and with a PATH that has no compiler. It has no other variables."""
    command = [sys.executable, "-c", SCRIPT, model, cache_dir]
    environ = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PATH": "/no-programs"}
    completed = subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout)


def test_a_start_imports_neither_a_compiler_nor_modelling_code(cache: str, reference_tiny: Any) -> None:
    tokens, outcomes, imported = run_script(cache)
    assert (outcomes, imported) == ([["hit", 0]] * 2, [])
    assert tokens == transformers_tokens(reference_tiny)


def test_a_bundle_starts_in_the_same_way(own_cache: str, tmp_path: Path, run_cli: RunCLI, reference_tiny: Any) -> None:
    bundle, unpacked = str(tmp_path / "tiny.tcb"), str(tmp_path / "unpacked")
    packed = run_cli("cache", "pack", TINY, *FLAGS, "--cache-dir", own_cache, "--out", bundle)
    assert packed.returncode == 0, packed.stderr
    assert run_cli("cache", "unpack", bundle, unpacked, "--allow-unsigned").returncode == 0
    measured = run_cli(
        "bench", "startup", TINY, *FLAGS, "--from", "bundle", "--bundle", bundle, "--allow-unsigned",
        "--prompt-length", "8", "--warm-runs", "1",
    )  # fmt: skip
    assert measured.returncode == 0, measured.stderr
    [row] = json.loads(measured.stdout)["rows"]
    assert row["start"] == "warm" and "transformers" not in row["import_seconds"]
    tokens, outcomes, imported = run_script(unpacked)
    assert (outcomes, imported) == ([["hit", 0]] * 2, [])
    assert tokens == transformers_tokens(reference_tiny)


def test_a_full_start_in_the_process_that_compiled_finds_its_packages(own_cache: str) -> None:
    deployment = prepare(aot_recipe(own_cache), needs_model=True)
    assert [record.outcome for record in deployment.records] == ["hit"] * 2
    assert len(list(Path(own_cache, "aot").glob("start-*.json"))) == 1


def test_random_requests_get_the_tokens_of_jit_programs(cache: str) -> None:
    source = random.Random(5)
    prompts = [[source.randrange(3, 900) for _ in range(source.randrange(1, 90))] for _ in range(20)]
    engine = start(cache).engine
    assert not engine.runner.has_model
    expected = generate_tokens(prepare_tiny(cache, **BUCKETS).engine, prompts, SamplingParams(max_tokens=12))
    assert generate_tokens(engine, prompts, SamplingParams(max_tokens=12)) == expected


def imported(log: str) -> set[str]:
    """The modules that a process with PYTHONPROFILEIMPORTTIME has listed."""
    return {line.rpartition("|")[2].strip() for line in log.splitlines() if line.startswith("import time:")}


@contextlib.contextmanager
def serving(command: Sequence[str], log: Path, environ: dict[str, str]) -> Iterator[str]:
    """The address of a server; its stderr is written to `log`. It runs in the folder of the log."""
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [*command, "--port", "0"], stdout=subprocess.PIPE, stderr=stderr, text=True, env=environ, cwd=log.parent
        ) as server,
    ):
        try:
            assert server.stdout is not None
            address = next((line.split()[1] for line in server.stdout if line.startswith("ready: ")), "")
            assert address, log.read_text()
            yield address
        finally:
            server.terminate()


def test_generate_and_serve_start_without_transformers_and_compilers(cache: str, tmp_path: Path) -> None:
    """Python lists the imports. Chats and grammars need the tokenizer in other ways than completions."""
    flags = (TINY, *FLAGS, "--cache-dir", cache)
    environ = cli_environment(tmp_path, OMP_NUM_THREADS=str(torch.get_num_threads()), PYTHONPROFILEIMPORTTIME="1")
    command = cli_command("generate", *flags, "--max-new-tokens", "4", "--chat", "This module")
    generated = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert generated.returncode == 0 and generated.stdout.strip(), generated.stderr
    log = tmp_path / "log"
    limits = {"max_tokens": 4, "temperature": 0}
    messages = [{"role": "user", "content": "This module"}]
    with serving(cli_command("serve", *flags), log, environ) as address:
        for path, body in (
            ("completions", {"prompt": PROMPT}),
            ("completions", {"prompt": "This", "response_format": {"type": "json_object"}, "logprobs": 1}),
            ("chat/completions", {"messages": messages}),
        ):
            answer = httpx.post(f"{address}/v1/{path}", json={**body, **limits}, timeout=60).json()
            assert answer["usage"]["completion_tokens"] == 4, answer
    for modules in map(imported, (generated.stderr, log.read_text())):
        assert {"tcdeploy.start.packages", "tokenizers"} <= modules
        assert not {name for name in modules if name.startswith(ABSENT_WITH_TOKENIZER)}


def test_tools_import_transformers_with_the_first_request_that_has_them(own_cache: str, tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    prepare(aot_recipe(own_cache, str(model)))
    environ = cli_environment(tmp_path, OMP_NUM_THREADS=str(torch.get_num_threads()), PYTHONPROFILEIMPORTTIME="1")
    log = tmp_path / "log"
    with serving(cli_command("serve", str(model), *FLAGS, "--cache-dir", own_cache), log, environ) as address:
        assert "transformers" not in imported(log.read_text())
        body = {"messages": [QUESTION], "tools": [CLOCK], "max_tokens": 99, "temperature": 0, "tool_choice": "required"}
        answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()
        [call] = answer["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "clock"
    modules = imported(log.read_text())
    assert "transformers.utils.chat_parsing" in modules and "torch._dynamo" not in modules


def test_a_tokenizer_that_cannot_be_stored_is_loaded_with_transformers(
    own_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shutil.copytree(BUILTIN_MODELS[TINY], tmp_path / "model")
    (model / "note.json").write_text("{}")  # so that the record has another key
    recipe = aot_recipe(own_cache, str(model))
    earlier = set(Path(own_cache, "aot").glob("start-*.json"))
    monkeypatch.setattr(tokenizer_module, "overridden_methods", lambda kind: ["decode"])
    prepare(recipe)
    [path] = set(Path(own_cache, "aot").glob("start-*.json")) - earlier
    record = json.loads(path.read_text())
    assert record["tokenizer"] is None and record["tokenizer_problem"].endswith("it overrides decode")
    deployment = packaged_start.start_from_packages(StartRequest(recipe, needs_tokenizer=True))
    assert deployment is not None and isinstance(deployment.tokenizer, PreTrainedTokenizerFast)
    monkeypatch.setattr(extras, "is_installed", lambda name: name != "transformers")
    with pytest.raises(UsageError, match="load the tokenizer of this model, because .* it overrides decode") as error:
        packaged_start.start_from_packages(StartRequest(recipe, needs_tokenizer=True))
    assert error.value.hint == install_command("compile")


def test_a_backend_that_differs_from_the_models_file_is_in_the_cache(own_cache: str, tmp_path: Path) -> None:
    """Without it in the manifest, a bundle would lack it."""
    model = shutil.copytree(BUILTIN_MODELS[TINY], tmp_path / "model")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "extra_special_tokens": ["<added>"]}))
    recipe = aot_recipe(own_cache, str(model))
    prepare(recipe)
    deployment = packaged_start.start_from_packages(StartRequest(recipe, needs_tokenizer=True))
    assert deployment is not None
    [added] = deployment.tokenizer("<added>", add_special_tokens=False).input_ids
    assert added in deployment.tokenizer.all_special_ids
    [path] = Path(own_cache, "aot").glob("tokenizer-*.json")
    manifest = read_manifest(manifest_path(own_cache, deployment.plan.key))
    assert manifest is not None and f"aot/{path.name}" in {file.path for file in manifest.files}
    path.write_text("{}")
    with pytest.raises(IntegrityError):
        packaged_start.start_from_packages(StartRequest(recipe, needs_tokenizer=True))


def test_a_model_without_a_tokenizer_has_a_record_for_commands_that_need_none(own_cache: str, tmp_path: Path) -> None:
    model = shutil.copytree(
        BUILTIN_MODELS[TINY], tmp_path / "model", ignore=shutil.ignore_patterns("*token*", "*.jinja")
    )
    recipe = aot_recipe(own_cache, str(model))
    prepare(recipe)
    deployment = packaged_start.start_from_packages(StartRequest(recipe))
    assert deployment is not None and not deployment.engine.runner.has_model
    assert packaged_start.start_from_packages(StartRequest(recipe, needs_tokenizer=True)) is None


def test_steps_may_run_while_the_weights_are_read(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. The weights are read only after the steps have run here, and the tokens are the same."""
    loading_weights, events = weight_sources.loading_weights, []

    @contextlib.contextmanager
    def read_late(*arguments: Any) -> Iterator[LoadingWeights]:
        sources, _, device = arguments
        weights = {
            name: torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
            for name, (dtype, shape, _) in sources.items()
        }
        yield LoadingWeights(weights, ReadTotal())
        events.append("read")
        with loading_weights(*arguments) as complete:
            pass
        for name, weight in weights.items():
            if sources[name].source[0] != "stored":
                weight.copy_(complete.tensors[name])

    def prepare_buckets(*arguments: Any, **options: Any) -> Any:
        events.append("prepare")
        return warmup.prepare_buckets(*arguments, **options)

    expected = generate_tokens(start(cache).engine, [PROMPT], SamplingParams(max_tokens=12))
    monkeypatch.setattr(packaged_start, "loading_weights", read_late)
    monkeypatch.setattr(packaged_start, "prepare_buckets", prepare_buckets)
    monkeypatch.setattr(packaged_start, "_prepares_early", lambda plan: True)
    deployment = start(cache)
    assert events == ["prepare", "read"]
    assert [(record.outcome, record.compiles) for record in deployment.records] == [("hit", 0)] * 2
    assert generate_tokens(deployment.engine, [PROMPT], SamplingParams(max_tokens=12)) == expected


def test_without_transformers_an_error_says_why_the_packages_are_not_used(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_transformers(monkeypatch)
    monkeypatch.setattr(record_lookup, "changed_sources", lambda digests: ["modeling_llama.py"])
    with pytest.raises(UsageError, match="modeling_llama.py of transformers has changed") as changed:
        start(cache)
    assert "the flags that the packages were made with" in changed.value.hint
    with pytest.raises(UsageError, match="the cache folder has no start record of this model"):
        start(str(tmp_path))


def hide_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed."""
    for module in (packaged_start, record_lookup):
        monkeypatch.setattr(module, "is_installed", lambda name: name != "transformers")


def start_without_transformers(
    cache_dir: str, monkeypatch: pytest.MonkeyPatch, needs_tokenizer: bool = False, **changes: Any
) -> None:
    """`changes`: fields of the recipe."""
    hide_transformers(monkeypatch)
    recipe = dataclasses.replace(aot_recipe(cache_dir), **changes)
    packaged_start.start_from_packages(StartRequest(recipe, needs_tokenizer=needs_tokenizer))


def rewrite_records(folder: str, **changes: Any) -> None:
    """Replace values of all start records, which keep their names."""
    for path in Path(folder, "aot").glob("start-*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    list_records(folder)


def list_records(folder: str) -> None:
    """Make the only manifest with records list those that the folder has now."""
    for key, manifest in read_manifests(folder).items():
        if any(is_record(file.path) for file in manifest.files):
            others = [file for file in manifest.files if not is_record(file.path)]
            paths = [path.relative_to(folder).as_posix() for path in Path(folder, "aot").glob("start-*.json")]
            files = (*others, *hash_files(folder, paths))
            write_manifest(manifest_path(folder, key), dataclasses.replace(manifest, files=files))


def is_record(path: str) -> bool:
    return path.startswith("aot/start-") and path.endswith(".json")


def change_factors(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], files: dict[str, str]) -> None:
    """Those of this start. A record's name contains a hash of them, so it is not found by its name any more."""
    factors = record_lookup.require_start_factors

    def changed_factors(*arguments: Any) -> StartFactors:
        found = factors(*arguments)
        return dataclasses.replace(found, versions=found.versions | versions, files=found.files | files)

    monkeypatch.setattr(record_lookup, "require_start_factors", changed_factors)


@pytest.mark.parametrize(
    ("versions", "files", "changes", "text", "kind"),
    [
        ({}, {}, {"buckets": (64,), "context": 64}, "--buckets 32 (here 64), no --context (here 64)", UsageError),
        ({}, {"config.json": "another"}, {}, "another config.json", UsageError),
        ({"tokenizers": "9.0"}, {}, {}, f"tokenizers {tokenizers.__version__} (here 9.0)", MismatchError),
        (
            {"tcdeploy": "9.0"}, {}, {"buckets": (64,)},
            f"tcdeploy {tcdeploy.__version__} (here 9.0), --buckets 32 (here 64)", MismatchError,
        ),
        (
            {}, {f"{number}.json": "" for number in range(7)}, {},
            ", ".join(f"no {number}.json (here there is one)" for number in range(5)) + ", 2 more", UsageError,
        ),
    ],
)  # fmt: skip
def test_without_transformers_an_error_names_what_the_packages_were_made_with(
    own_cache: str,
    versions: dict[str, str],
    files: dict[str, str],
    changes: dict[str, Any],
    text: str,
    kind: type[TcdeployError],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rewrite_records(own_cache, schema=9, unknown=1)  # as another version of tcdeploy may write them
    change_factors(monkeypatch, versions, files)
    with pytest.raises(kind, match=re.escape(f"the packages in {own_cache} were made with {text}; and transformers")):
        start_without_transformers(own_cache, monkeypatch, **changes)
    for manifest in Path(own_cache, "manifests").iterdir():  # as if the plan had been removed
        manifest.unlink()
    with pytest.raises(UsageError, match="the cache folder has no start record of this model"):
        start_without_transformers(own_cache, monkeypatch, **changes)


def test_of_several_records_one_of_these_versions_is_compared(own_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although one of another version differs in fewer values: a start can have other flags."""
    [path] = Path(own_cache, "aot").glob("start-*.json")
    values = json.loads(path.read_text())
    factors = values["factors"]
    older = {**factors, "versions": {**factors["versions"], "tcdeploy": "0.1"}}
    other_flags = {**factors, "recipe": {**factors["recipe"], "buckets": [64], "context": 64}}
    for name, changed in (("start-1-1.json", older), ("start-2-2.json", other_flags)):
        path.with_name(name).write_text(json.dumps({**values, "factors": changed}))
    path.unlink()
    list_records(own_cache)
    named = "--buckets 64 (here 32), --context 64 (here no --context);"
    with pytest.raises(UsageError, match=re.escape(f"were made with {named}")):
        start_without_transformers(own_cache, monkeypatch)
    path.with_name("start-2-2.json").unlink()
    list_records(own_cache)
    with pytest.raises(MismatchError, match=re.escape(f"were made with tcdeploy 0.1 (here {tcdeploy.__version__});")):
        start_without_transformers(own_cache, monkeypatch)


def test_a_record_without_factors_is_of_another_version(own_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rewrite_records(own_cache, factors={"recipe": {}})
    with pytest.raises(MismatchError, match=r"aot/start-.* was written by another version of tcdeploy;"):
        start_without_transformers(own_cache, monkeypatch, buckets=(64,))
    for path in Path(own_cache, "aot").glob("start-*.json"):
        path.write_text("[" * 200_000)
    list_records(own_cache)
    with pytest.raises(UsageError, match="the cache folder has no start record of this model"):
        start_without_transformers(own_cache, monkeypatch, buckets=(64,))


def test_without_transformers_a_record_without_tokenizer_is_named(
    own_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [path] = Path(own_cache, "aot").glob("start-*.json")
    decisions = json.loads(path.read_text())["decisions"]
    rewrite_records(own_cache, decisions={WITHOUT_TOKENIZER: decisions[WITHOUT_TOKENIZER]})
    with pytest.raises(UsageError, match=r"aot/start-.* has no tokenizer, because none could be loaded"):
        start_without_transformers(own_cache, monkeypatch, needs_tokenizer=True)


def test_without_transformers_missing_model_files_are_named(own_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="the files of org/model are not on this machine;"):
        start_without_transformers(own_cache, monkeypatch, model="org/model")


@pytest.mark.parametrize("has_record", [True, False])
def test_without_transformers_packages_of_another_machine_are_a_mismatch(
    own_cache: str, has_record: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record's name contains versions, so one of other versions is not found. Then the manifests say what differs."""
    here = record_lookup.detect_environment()
    changed = dataclasses.replace(here, **({"cpu": "another"} if has_record else {"python": f"{here.python}9"}))
    monkeypatch.setattr(record_lookup, "detect_environment", lambda device: changed)
    hide_transformers(monkeypatch)
    if not has_record:
        [record] = Path(own_cache, "aot").glob("start-*.json")
        record.rename(record.with_name(f"start-{'0' * 16}-{'0' * 16}.json"))
        list_records(own_cache)
    named = f"cpu {here.cpu} (here another)" if has_record else f"python {here.python} (here {here.python}9)"
    with pytest.raises(MismatchError, match=re.escape(f"were made in another environment: {named};")) as mismatch:
        start(own_cache)
    assert "tcdeploy cache pack" in mismatch.value.hint


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory\ndetails"), OSError("stale file handle")])
def test_weights_that_cannot_be_read_are_loaded_with_transformers(
    cache: str, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(checkpoint_reader, "_read", fail)
    with caplog.at_level(logging.WARNING):
        assert start(cache) is None
    assert str(error).splitlines()[0] in caplog.text


def test_after_an_error_of_the_gpu_driver_the_model_is_loaded_with_transformers(
    cache: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example a driver that is too old for a stored kernel."""

    def warm(*arguments: Any) -> None:
        raise DriverError("the CUDA driver cannot load _decode_kernel")

    monkeypatch.setattr(packaged_start, "warm", warm)
    with caplog.at_level(logging.WARNING):
        assert start(cache) is None
    assert "the CUDA driver cannot load _decode_kernel" in caplog.text


def test_steps_are_not_timed_again(own_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(runner: Any) -> Any:
        raise AssertionError("steps are timed")

    monkeypatch.setattr(loaded_start, "measure_step_costs", measure)
    deployment = start(own_cache)
    assert deployment.weights_read.num_bytes > 1 << 20 and deployment.weights_read.gb_per_second > 0
    manifest = read_manifests(own_cache)[deployment.plan.key]
    costs = dict(manifest.step_costs or {})
    assert len(costs.pop("sources")) == 64
    assert deployment.engine.clock.predictor.costs == parse_step_costs(costs)
    path = manifest_path(own_cache, deployment.plan.key)
    for damage in ({"prefill_ms": [[32, "fast"]]}, {"sources": "of another version"}):
        write_manifest(path, dataclasses.replace(manifest, step_costs={**(manifest.step_costs or {}), **damage}))
        with pytest.raises(AssertionError, match="steps are timed"):
            start(own_cache)


@pytest.mark.long  # five starts
def test_a_start_writes_the_manifest_only_if_more_than_its_measurements_would_change(own_cache: str) -> None:
    run_script(own_cache)  # before, the manifest may be that of the start that compiled
    key = start(own_cache).plan.key
    run_script(own_cache)  # again, because `start` was not the first of its process
    manifest = read_manifests(own_cache)[key]
    path = manifest_path(own_cache, key)
    text = path.read_text()
    os.utime(path, (0, 0))
    run_script(own_cache)
    assert path.read_text() == text
    assert time.time() - path.stat().st_mtime < 600, "its time is that of the last start"
    write_manifest(path, dataclasses.replace(manifest, environment={**manifest.environment, "driver": "of a GPU"}))
    run_script(own_cache)
    rewritten = read_manifests(own_cache)[key]
    assert rewritten.environment == manifest.environment and rewritten.stage_seconds != manifest.stage_seconds
    assert rewritten.files == manifest.files


def test_log_probabilities_of_a_prompt_need_no_model(cache: str) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=1)

    def logprobs(engine: Any) -> list[float]:
        engine.submit(PROMPT, params)
        tokens = [token for _ in iter(lambda: engine.has_work, False) for token in engine.step()]
        return [entry.chosen for token in tokens for entry in token.prompt_logprobs or ()]

    expected = logprobs(prepare_tiny(cache, **BUCKETS).engine)
    assert len(expected) == len(PROMPT) - 1
    assert logprobs(start(cache).engine) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"transformers": "0.1"}, "made with transformers"),
        ({"cpu": "another"}, "made in another environment: cpu {cpu} (here another)"),
        ({"torch": "0.1"}, "made in another environment: torch {torch} (here 0.1)"),
    ],
)
def test_packages_of_another_machine_are_refused(
    cache: str,
    changes: dict[str, str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = record_lookup.detect_environment()
    monkeypatch.setattr(record_lookup, "detect_environment", lambda device: dataclasses.replace(here, **changes))
    with caplog.at_level(logging.WARNING):
        assert start(cache) is None
    assert reason.format(**dataclasses.asdict(here)) in caplog.text


def test_a_new_setting_of_the_compiler_is_noticed(
    cache: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_MAX_AUTOTUNE", "1")
    with caplog.at_level(logging.WARNING):
        assert start(cache) is None
    assert "another value of TORCHINDUCTOR_MAX_AUTOTUNE" in caplog.text


def test_an_edit_of_modelling_code_is_noticed(
    cache: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    [record] = Path(cache, "aot").glob("start-*.json")
    recorded = json.loads(record.read_text())["sources"]
    assert {"models/qwen3/modeling_qwen3.py", "modeling_rope_utils.py"} & recorded.keys()
    monkeypatch.setattr(sources, "_package_folder", lambda: tmp_path)
    with caplog.at_level(logging.WARNING):
        assert start(cache) is None
    assert "of transformers has changed since the packages were made" in caplog.text


def test_only_executed_files_of_transformers_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called, other = tmp_path / "called.py", tmp_path / "other.py"
    called.write_text("def call():\n    return 1\n")
    other.write_text("def unused():\n    return 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import called as module  # type: ignore[import-not-found]

    other_module = importlib.import_module("other")
    files: set[str] = set()
    for _ in range(2):
        files.clear()
        with record_executed_files(files):
            module.call()
    importlib.reload(other_module)
    assert str(other) not in files, "the block has ended"
    monkeypatch.setattr(sources, "_package_folder", lambda: tmp_path)
    digests = digest_sources(files)
    assert list(digests) == ["called.py"] and changed_sources(digests) == []
    called.write_text("def call():\n    return 3\n")
    assert changed_sources(digests) == ["called.py"]


@pytest.mark.parametrize("fault", ["layers swapped", "one element"])
def test_a_wrong_program_is_caught_by_the_stored_reference(
    cache: str, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loading_weights = weight_sources.loading_weights

    @contextlib.contextmanager
    def with_a_fault(*arguments: Any) -> Iterator[LoadingWeights]:
        first, second = "model.layers.0.mlp.down_proj.weight", "model.layers.1.mlp.down_proj.weight"
        with loading_weights(*arguments) as loading:
            weights = loading.tensors
            if fault == "layers swapped":
                weights[first], weights[second] = weights[second], weights[first]
            yield loading
        if fault == "one element":
            weights[first][3, 5] += 10

    monkeypatch.setattr(packaged_start, "loading_weights", with_a_fault)
    with caplog.at_level(logging.WARNING):
        assert start(cache) is None
    assert "differs from the stored one" in caplog.text


def test_other_weights_of_the_same_shapes_are_checked_with_transformers_once(own_cache: str, tmp_path: Path) -> None:
    """Their header and size are equal, so the record is found; their logits are others. Then they have a record."""
    from transformers import AutoModelForCausalLM

    model = shutil.copytree(BUILTIN_MODELS[TINY], tmp_path / "model")
    weights = load_file(model / "model.safetensors")
    weights["model.layers.2.mlp.down_proj.weight"] *= -1
    save_file(weights, model / "model.safetensors", {"format": "pt"})
    assert start(own_cache, str(model)) is None
    deployment = prepare(aot_recipe(own_cache, str(model)))
    assert deployment.engine.runner.has_model
    assert [record.outcome for record in deployment.records] == ["hit"] * 2, "programs do not depend on weights"
    expected = transformers_tokens(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval())
    tokens, _, imported = run_script(own_cache, str(model))
    assert (tokens, imported) == (expected, [])


@pytest.mark.parametrize("missing", ["reference", "buffers"])
def test_a_record_without_its_files_is_not_used(own_cache: str, missing: str) -> None:
    [path] = Path(own_cache, "aot").glob("start-*.json")
    record = json.loads(path.read_text())
    Path(own_cache, record[missing]).unlink()
    with pytest.raises(IntegrityError, match="is missing"):
        start(own_cache)


def test_a_damaged_record_is_reported_as_damage_before_it_is_used(own_cache: str) -> None:
    [path] = Path(own_cache, "aot").glob("start-*.json")
    path.write_text(path.read_text().replace('["float32", [', '["float33", ['))
    with pytest.raises(IntegrityError, match=path.name):
        start(own_cache)


@pytest.mark.parametrize("damage", ["content", "a link"])
def test_files_of_triton_that_cannot_be_restored_are_logged(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "cache"
    make_private_folder(root)
    file = root / "triton/KEY/kernel.cubin"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"kernel")
    staging = create_staging_folder(str(root))
    staging.defer([FileRecord("triton/KEY/kernel.cubin", 6, hashlib.sha256(b"kernel").hexdigest())])
    if damage == "content":
        file.write_bytes(b"kErnel")
    else:
        file.parent.rename(tmp_path / "elsewhere")
        file.parent.symlink_to(tmp_path / "elsewhere")
    packaged_start._restore_triton_files(staging)
    assert "Triton compiles" in caplog.text
    assert bool(staging.deferred) == (damage == "a link"), "files that were not compared stay deferred"


@pytest.mark.parametrize(
    ("content", "reason"), [("[" * 200_000, "recursion"), ("{}", "is missing"), ("[]", "must be a JSON object")]
)
def test_an_invalid_record_that_a_plan_lists_is_damage(own_cache: str, content: str, reason: str) -> None:
    [path] = Path(own_cache, "aot").glob("start-*.json")
    path.write_text(content)
    list_records(own_cache)
    with pytest.raises(IntegrityError, match=rf"the start record aot/start-.* is invalid: .*{reason}"):
        start(own_cache)


def test_a_damaged_record_is_replaced_if_that_is_allowed(own_cache: str, caplog: pytest.LogCaptureFixture) -> None:
    rewrite_records(own_cache, architecture=None)
    recipe = dataclasses.replace(aot_recipe(own_cache), on_bad_cache="rebuild")
    with caplog.at_level(logging.WARNING):
        assert packaged_start.start_from_packages(StartRequest(recipe)) is None
    assert "architecture is None; it must be a JSON object" in caplog.text


@pytest.mark.parametrize("form", ["a copy", "nested", "a FIFO", "a device", "a link"])
def test_a_newer_record_that_no_plan_lists_is_ignored(own_cache: str, form: str) -> None:
    """A reader would wait for the FIFO, and the device has no end."""
    [path] = Path(own_cache, "aot").glob("start-*.json")
    newer = path.with_name(f"{path.name[:-21]}{'0' * 16}.json")
    if form == "a FIFO":
        os.mkfifo(newer)
    elif form == "a device":
        newer.symlink_to("/dev/zero")
    elif form == "a link":
        newer.symlink_to(path)
    else:
        newer.write_text("[" * 200_000 if form == "nested" else path.read_text().replace('"float32"', '"float33"'))
    if newer.is_symlink():
        with pytest.raises(TrustError, match="is a symbolic link"):
            start(own_cache)
        newer.unlink()
    found = record_lookup.find_record(StartRequest(aot_recipe(own_cache), trusted_keys=Path("no keys")))
    assert found.path == f"aot/{path.name}"


def test_no_record_is_written_for_packages_that_call_ops_of_other_libraries(
    own_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Step programs name the ops, so a start that loads its packages knows them too. The model has no record yet."""
    model = shutil.copytree(BUILTIN_MODELS[TINY], tmp_path / "model")
    (model / "notes.json").write_text("{}")

    def with_a_foreign_op(text: str) -> StepProgram:
        return dataclasses.replace(parse_step_program(text), foreign_ops=("some_library::scale",))

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(packages, "parse_step_program", with_a_foreign_op)
        deployment = prepare(aot_recipe(own_cache, str(model)), needs_model=True)
    assert [record.outcome for record in deployment.records] == ["hit"] * 2
    assert "because its packages call some_library::scale" in caplog.text
    assert start(own_cache, str(model)) is None
    prepare(aot_recipe(own_cache, str(model)), needs_model=True)
    assert start(own_cache, str(model)) is not None


class ServeOnly(NamedTuple):
    """A new virtual environment with the extra serve, and an unpacked bundle."""

    folder: Path
    flags: tuple[str, ...]
    environ: dict[str, str]

    def command(self, *arguments: str) -> list[str]:
        return [str(self.folder / "bin/tcdeploy"), *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, env=self.environ, cwd=self.folder, timeout=120
        )


def install_with_pip(folder: Path) -> None:
    pins = re.findall(r"^[a-z0-9-]+==[^\\\n]+", (ROOT / "scripts/locks/dev.txt").read_text(), re.MULTILINE)
    (folder / "pins.txt").write_text("\n".join(pins))
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    constraints = ("-c", str(ROOT / "scripts/constraints.txt"), "-c", str(folder / "pins.txt"))
    install = [folder / "venv/bin/pip", "install", "-q", "--no-compile", *constraints, f"{ROOT}[serve]"]
    installed = subprocess.run(install, capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr


@pytest.fixture(scope="module", params=["linked packages", pytest.param("pip", marks=pytest.mark.long)])
def serve_only(
    request: pytest.FixtureRequest, cache: str, tmp_path_factory: pytest.TempPathFactory, run_cli_in: RunCLI
) -> ServeOnly:
    """Its PATH has no compiler. All packages have the locked versions, as those of the tests have."""
    if HAS_GPU:
        pytest.skip("the environment of a GPU machine has another build of torch than pip selects")
    folder = tmp_path_factory.mktemp("serve_only")
    bundle, unpacked = str(folder / "tiny.tcb"), str(folder / "unpacked")
    packed = run_cli_in(folder, "cache", "pack", TINY, *FLAGS, "--cache-dir", cache, "--out", bundle)
    assert packed.returncode == 0, packed.stderr
    if request.param == "pip":
        install_with_pip(folder)
    else:
        create_environment(folder / "venv", "serve")
    environ = {
        "PATH": str(folder / "venv/bin"), "HOME": str(folder), "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }  # fmt: skip
    environment = ServeOnly(folder / "venv", (TINY, *FLAGS, "--cache-dir", unpacked), environ)
    done = environment.run("cache", "unpack", bundle, unpacked, "--allow-unsigned")
    assert done.returncode == 0, done.stderr
    return environment


def test_a_bundle_is_served_where_transformers_is_not_installed(
    serve_only: ServeOnly, tmp_path: Path, reference_tiny: Any
) -> None:
    """The same tokens as transformers gives, as text of a chat, and of a stream."""
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODELS[TINY])
    messages = [{"role": "user", "content": "This module"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    with serving(serve_only.command("serve", *serve_only.flags), tmp_path / "log", serve_only.environ) as address:
        limits = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{address}/v1/chat/completions", json={"messages": messages, **limits}, timeout=60).json()
        expected = tokenizer.decode(greedy_tokens(reference_tiny, chat), skip_special_tokens=True)
        assert answer["choices"][0]["message"]["content"] == expected
        streamed = httpx.post(
            f"{address}/v1/completions", json={"prompt": PROMPT, "stream": True, **limits}, timeout=60
        )
        events = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
        text = "".join(event["choices"][0]["text"] for event in events)
        assert len(events) > 1 and text == tokenizer.decode(greedy_tokens(reference_tiny, PROMPT))
        info = httpx.get(f"{address}/tokenizer_info").json()
        assert info["tokenizer_class"] == type(tokenizer).__name__
    warnings = [line for line in (tmp_path / "log").read_text().splitlines() if line.startswith("warning")]
    assert not [line for line in warnings if "bytecode" not in line]  # pip ran with --no-compile


def test_text_is_generated_where_transformers_is_not_installed(
    serve_only: ServeOnly, cache: str, run_cli: RunCLI
) -> None:
    prompt = ("--max-new-tokens", "12", "--temperature", "0", "This module")
    generated = serve_only.run("generate", *serve_only.flags, *prompt)
    assert generated.returncode == 0, generated.stderr
    expected = run_cli("generate", TINY, *FLAGS, "--cache-dir", cache, *prompt)
    assert generated.stdout == expected.stdout and expected.stdout.strip()


@pytest.mark.parametrize(
    "arguments",
    [
        ("compile", TINY),
        ("warm", TINY, "--dry-run"),
        ("serve", TINY, "--port", "0", "--cache-dir", "empty"),
        ("bench", "decode", TINY),
    ],
    ids=" ".join,
)
def test_commands_that_need_transformers_name_the_extra_that_installs_it(
    serve_only: ServeOnly, arguments: tuple[str, ...]
) -> None:
    lookup = subprocess.run(
        [serve_only.folder / "bin/python", "-c", "import transformers"], capture_output=True, text=True
    )
    assert "ModuleNotFoundError" in lookup.stderr
    failed = serve_only.run(*arguments)
    assert failed.returncode == 2 and "Traceback" not in failed.stderr
    assert "error: transformers is not installed, and it is needed to load and compile a model" in failed.stderr
    assert re.search(r"^hint: .*install .*\[compile\]", failed.stderr, re.MULTILINE), failed.stderr


def test_without_a_start_record_an_error_names_the_extra_too(serve_only: ServeOnly) -> None:
    failed = serve_only.run("generate", TINY, "Hi", "--cache-dir", "empty", "--programs", "aot")
    assert failed.returncode == 2 and "Traceback" not in failed.stderr
    assert "the cache folder has no start record of this model" in failed.stderr
    assert re.search(r", or .*install .*\[compile\]", failed.stderr), failed.stderr
