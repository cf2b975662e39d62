"""Ahead-of-time packages of the embedded model: compiled by one start, loaded by later ones, and checked by each."""

from __future__ import annotations

import json
import random
import shutil
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tcdeploy.engine.check.inputs import make_timing_batch
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.errors import CompileError, RecompileError
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.programs import aot, stances
from tcdeploy.programs.compile_stats import measure_compiles, read_counts
from tcdeploy.start.prepare import prepare
from tests.conftest import TINY, RunCLI, prepare_tiny
from tests.engine_loop import generate_tokens

BUCKETS = {"buckets": (32,), "batch_sizes": (4,)}  # of `filled_packages`
FLAGS = ("--buckets", "32", "--batch-sizes", "4", "--programs", "aot")


@pytest.fixture(scope="module")
def deployment(cache_dir: str, filled_packages: Path) -> Iterator[Any]:
    """Loads the six packages of `filled_packages` beside the model. Each call of a package checks its inputs."""
    shutil.copytree(filled_packages, cache_dir, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "1")
        yield prepare_tiny(cache_dir, programs="aot", **BUCKETS)


def test_a_cold_start_compiles_and_records_its_packages(filled_packages: Path) -> None:
    [path] = filled_packages.glob("manifests/*.json")
    manifest = json.loads(path.read_text())
    counts = [
        (bucket["outcome"], bucket["programs"], bucket["cache_hits"], bucket["cache_misses"])
        for bucket in manifest["buckets"]
    ]
    assert counts == [("miss", 3, 0, 3)] * 2
    packages = [file["path"] for file in manifest["files"] if file["path"].endswith(".pt2")]
    assert len(packages) == 6 and all(path.startswith("aot/") for path in packages)


def test_packages_share_the_compiled_runtime_of_torch(filled_packages: Path) -> None:
    """torch includes its source in the C++ code of each package, which then takes three times as long to compile."""
    packages = list(filled_packages.glob("aot/*/*.pt2"))
    assert len(packages) == 6
    for path in packages:
        with zipfile.ZipFile(path) as archive:
            source, library = (
                archive.read(name)
                for suffix in ("cpp", "so")
                for name in archive.namelist()
                if name.endswith(f".wrapper.{suffix}")
            )
        assert b"AOTInductorModelContainerCreate(" not in source and b"AOTInductorModelContainerCreate" in library


def test_a_later_start_loads_packages_and_neither_traces_nor_compiles(
    deployment: Any, cache_dir: str, run_cli: RunCLI, tmp_path: Path
) -> None:
    """In a process of its own, without a compiler on PATH. It leaves no unpacked package in TMPDIR."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environ = {"PATH": str(Path(sys.executable).parent), "TMPDIR": str(temporary)}
    report = run_cli("warm", TINY, *FLAGS, "--cache-dir", cache_dir, "--require-hit", "--json", new=True, **environ)
    assert report.returncode == 0, report.stderr
    document = json.loads(report.stdout)
    for bucket in document["buckets"]:
        assert (bucket["outcome"], bucket["programs"], bucket["cache_hits"]) == ("hit", 3, 3)
        assert (bucket["compiles"], bucket["kernels_compiled"], bucket["cache_misses"]) == (0, 0, 0)
    assert not list(temporary.glob("aotinductor*"))


@pytest.mark.long  # start/test_packaged_start.py does the same after a start from packages
def test_random_requests_get_the_tokens_of_jit_programs(deployment: Any, cache_dir: str) -> None:
    """With prompts longer than the bucket, and with mixed steps. Nothing compiles."""
    source = random.Random(22)
    prompts = [[source.randrange(3, 900) for _ in range(source.randrange(1, 90))] for _ in range(40)]
    jit = prepare_tiny(cache_dir, **BUCKETS).engine
    expected = [generate_tokens(jit, [prompt], SamplingParams(max_tokens=12))[0] for prompt in prompts]
    engine, answers = deployment.engine, {}
    waiting = list(prompts)
    with measure_compiles() as serving:
        while waiting or engine.has_work:
            if waiting and source.random() < 0.5:
                answers[engine.submit(waiting.pop(0), SamplingParams(max_tokens=12))] = []
            for token in engine.step():
                answers[token.request_id].append(token.token_id)
    assert list(answers.values()) == expected
    assert serving.counts.compiles == serving.counts.programs == 0
    assert engine.runner.step_counts[deployment.plan.prefill_buckets[0]] > 20


@pytest.mark.parametrize("length", [2, 3, 32, 40])
def test_log_probabilities_of_a_prompt_are_those_of_jit_programs(deployment: Any, cache_dir: str, length: int) -> None:
    """A prompt of 2 tokens has one row, which programs compute twice."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=2, logprobs=2)
    prompt = list(range(10, 10 + length))

    def logprobs(engine: Any) -> list[Any]:
        engine.submit(prompt, params)
        found = []
        while engine.has_work:
            found += [token.prompt_logprobs for token in engine.step() if token.prompt_logprobs]
        return found

    [ours], [theirs] = logprobs(deployment.engine), logprobs(prepare_tiny(cache_dir, **BUCKETS).engine)
    assert len(ours) == len(theirs) == length - 1
    for entry, expected in zip(ours, theirs, strict=True):
        assert entry.chosen == pytest.approx(expected.chosen, abs=1e-4)
        assert [token_id for token_id, _ in entry.top] == [token_id for token_id, _ in expected.top]


def test_a_step_without_a_package_is_an_error_after_warm_up(deployment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = deployment.engine.runner.forward
    monkeypatch.setattr(forward, "_steps", {})
    with pytest.raises(RecompileError, match="was not loaded or compiled during start-up"):
        generate_tokens(deployment.engine, [[5, 6, 7]], SamplingParams(max_tokens=2))


@pytest.mark.parametrize("is_copy", [False, True])
def test_packages_of_other_processes_are_fetched_and_own_ones_are_offered(
    deployment: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_copy: bool
) -> None:
    """Another process has compiled the package that this one would compile last: the last, or the first for a copy."""
    runner, compiled, offered = deployment.engine.runner, [], []
    packaged, folder = runner.forward, tmp_path / "aot" / "key"
    names = json.loads((packaged.folder / "decode-4_default.json").read_text())["inputs"]
    ordered = list(reversed(names)) if is_copy else list(names)

    def start_package(exported: Any, path: str, options: Any) -> Future[None]:
        name = Path(path).name.removesuffix(".partial.pt2")
        compiled.append(name)
        shutil.copy(packaged.package_path(name), path)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def fetch() -> None:
        shutil.copy(packaged.package_path(ordered[-1]), folder)

    monkeypatch.setattr(aot, "start_package", start_package)
    reports = list[str]()
    exchange = aot.PackageExchange(fetch, lambda path: offered.append(path.stem), reports.append)
    forward = aot.AotForward(runner.transformers_forward, packaged._layers, deployment.plan, folder, is_copy, exchange)
    monkeypatch.setattr(runner, "forward", forward)
    before = read_counts()
    [bucket] = deployment.plan.decode_buckets
    with stances._set_stance("compile"), runner.uncounted_steps():
        make_timing_batch(runner, bucket).run()
    counts = read_counts() - before
    assert compiled == offered
    total = len(compiled) + 1  # with the package of the other process
    assert reports == [*(f"package {number} of {total}" for number in range(1, total + 1)), "C++ compiler", ""]
    decode = [name for name in compiled if name in ordered]
    assert decode == ordered[:-1]
    assert (folder / "decode-4_default.json").is_file() is not is_copy, "the step of a copy has fewer layers"
    assert counts.cache_misses == len(compiled)
    assert counts.cache_hits > 0


def test_a_program_with_a_wrong_weight_fails_its_parity_check(
    deployment: Any, cache_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second layer runs with a weight of the first one."""
    constants = aot._constants

    def with_a_wrong_weight(model: nn.Module, layers: Any) -> dict[str, torch.Tensor]:
        tensors = constants(model, layers)
        name = "weight/model.layers.{}.mlp.down_proj.weight"
        return {**tensors, name.format(1): tensors[name.format(0)]}

    monkeypatch.setattr(aot, "_constants", with_a_wrong_weight)
    recipe = build_recipe({"model": TINY, "programs": "aot", "cache_dir": cache_dir, **BUCKETS}, environ={})
    with pytest.raises(CompileError, match="failed its parity check"):
        prepare(recipe, needs_model=True)


def test_an_edit_of_the_models_source_changes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "edited_model.py"
    source.write_text("from torch import nn\n\nclass Model(nn.Linear):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import edited_model  # type: ignore[import-not-found]

    model = nn.Sequential(edited_model.Model(2, 2), nn.ReLU())
    arguments = ("/cache", "plan", {"ops.py": "1"}, {"setting": "a"})
    assert list(aot.model_sources(model)) == ["edited_model"], "torch's own classes are covered by its version"
    before = aot.package_folder(*arguments, model)
    source.write_text(source.read_text().replace("pass", "bias = None"))
    after = aot.package_folder(*arguments, model)
    others = {
        aot.package_folder("/cache", "plan", {"ops.py": "2"}, {"setting": "a"}, model),
        aot.package_folder("/cache", "plan", {"ops.py": "1"}, {"setting": "b"}, model),
        aot.package_folder("/cache", "other", {"ops.py": "1"}, {"setting": "a"}, model),
    }
    assert len({before, after, *others}) == 5
