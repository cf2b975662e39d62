"""Models in a scheme of tests start, from programs and from packages, with the tokens of dense ones.

The dense model has the dequantised weights in float32. The kernel of the scheme does not dequantise, so the parity
check compares it with another computation; kernels with a planted mistake fail it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph

from tcdeploy.engine.check.parity_check import FAILED, ParityChecker
from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.engine.warm.warmup import PreviousRun, warm_bucket
from tcdeploy.errors import CompileError
from tcdeploy.models.location import BUILTIN_MODELS
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.programs import aot
from tcdeploy.programs.passes import post_grad
from tcdeploy.programs.passes.nodes import is_weight
from tcdeploy.start.eager import check_eager_steps
from tcdeploy.start.model_code import load_uncompiled
from tcdeploy.start.prepare import prepare
from tests.conftest import PACKAGES, TINY, cli_environment, reset_programs
from tests.engine.test_canary import recorded_canary, run_round
from tests.engine_loop import generate_tokens
from tests.exported_programs import exported_programs
from tests.fork_server import ForkServer
from tests.int8_checkpoint import Pair, registered, save_pair
from tests.int8_rows import FAULTS
from tests.start.test_packaged_families import save_model

PROMPTS = [list(range(40, 60)), [5, 6, 7]]
BUCKETS: dict[str, Any] = {"buckets": (32,), "batch_sizes": (4,)}
OP = torch.ops.tcdeploy.scheme_linear.default


def start(folder: Path, cache_dir: Path | str, **flags: Any) -> Any:
    return prepare(build_recipe({"model": str(folder), "cache_dir": str(cache_dir), **BUCKETS, **flags}, environ={}))


def tokens_of(engine: Any) -> list[list[int]]:
    tokens = generate_tokens(engine, PROMPTS, SamplingParams(max_tokens=12))
    assert len(set(tokens[0])) > 2, "the tokens depend on what was computed"
    return tokens


def outcomes(deployment: Any) -> list[tuple[str, int]]:
    return [(record.outcome, record.compiles) for record in deployment.records]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(BUILTIN_MODELS[TINY], tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A llama with two layers."""
    folder = tmp_path_factory.mktemp("small")
    save_model("llama", folder / "source")
    return save_pair(folder / "source", folder)


def counted_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """(calls of the op, whether all of their tensors are weights) of each graph of a decoder layer after the passes."""
    found: list[tuple[int, bool]] = []
    sink_slices = post_grad.sink_slices

    def count(graph: Graph) -> None:
        sink_slices(graph)
        if calls := graph.find_nodes(op="call_function", target=OP):
            found.append((len(calls), all(is_weight(item) for call in calls for item in call.args[1])))

    monkeypatch.setattr(post_grad, "sink_slices", count)
    return found


def test_compiled_programs_give_the_tokens_of_the_dense_model(
    tiny: Pair, tiny_tokens: list[list[int]], cache_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed layers call the op once: a decoder layer has four products. All steps of the canary repeat."""
    reset_programs()  # a program that another test compiled might serve these shapes
    calls = counted_calls(monkeypatch)
    with registered():
        first = start(tiny.quantised, cache_dir)
        assert outcomes(first) == [("miss", 1)] * 2
        assert set(calls) == {(4, True)} and len(calls) >= 2
        assert tokens_of(first.engine) == tiny_tokens
        canary = recorded_canary(first.engine)
        assert not canary.unrepeatable and run_round(canary) == []
        again = start(tiny.quantised, cache_dir)
        assert outcomes(again) == [("reused", 0)] * 2
        assert tokens_of(again.engine) == tiny_tokens
    with registered(None):  # the same programs, without a kernel
        assert tokens_of(start(tiny.quantised, cache_dir).engine) == tiny_tokens


def eager_engine(folder: Path, cache_dir: Path | str) -> Engine:
    """Its steps run uncompiled, and are checked, as while a server compiles its programs."""
    recipe = build_recipe({"model": str(folder), "cache_dir": str(cache_dir), **BUCKETS}, environ={})
    planned, runner = load_uncompiled(recipe)
    for bucket in planned.plan.buckets:
        runner.run_eagerly(bucket)
    check_eager_steps(runner, ParityChecker(runner, planned.architecture, planned.config))
    return Engine(runner)


@pytest.fixture(scope="module")
def tiny_tokens(tiny: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Of the dense model, uncompiled: test_compiled_programs... would otherwise compile it too."""
    return tokens_of(eager_engine(tiny.dense, tmp_path_factory.mktemp("cache")))


def test_eager_steps_give_the_tokens_of_the_dense_model(
    tiny: Pair, tiny_tokens: list[list[int]], tmp_path: Path
) -> None:
    with registered():
        assert tokens_of(eager_engine(tiny.quantised, tmp_path)) == tiny_tokens


SCRIPT = f"""
import json, sys
sys.path[:0] = {PACKAGES.split(":")!r}
from tcdeploy import Recipe, SamplingParams, prepare
from tests.engine_loop import generate_tokens
from tests.int8_rows import scheme_registered

model, cache, programs = sys.argv[1:]
with scheme_registered():
    if programs == "jit":
        from tests.int8_checkpoint import METHOD, METHODS, Method, find, scheme_of
        METHODS[METHOD] = Method(find, scheme_of)
    deployment = prepare(Recipe(model=model, programs=programs, buckets=(32,), batch_sizes=(4,), cache_dir=cache))
    tokens = generate_tokens(deployment.engine, {PROMPTS}, SamplingParams(max_tokens=12))
outcomes = [record.outcome for record in deployment.records]
print(json.dumps([tokens, outcomes, "transformers" in sys.modules]))
"""


@pytest.mark.parametrize("programs", ["jit", "aot"])
def test_a_new_process_starts_from_the_cache(
    programs: str, tiny: Pair, cache_dir: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    """From packages without transformers, which a fork would have imported."""
    with registered():
        expected = tokens_of(start(tiny.quantised, cache_dir, programs=programs).engine)
    environ = cli_environment(tmp_path, OMP_NUM_THREADS=str(torch.get_num_threads()))
    arguments = [str(tiny.quantised), cache_dir, programs]
    if programs == "jit" and fork_server.supports(environ):
        completed = fork_server.run(
            environ=environ, script=f"import sys\nsys.argv[1:] = {arguments}\n{SCRIPT}", cwd="/"
        )
    else:
        command = [sys.executable, "-c", SCRIPT, *arguments]
        completed = subprocess.run(command, env=environ, cwd="/", capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout.splitlines()[-1]) == [expected, ["hit"] * 2, programs == "jit"]


LONG_FAMILIES = [pytest.param(family, marks=pytest.mark.long) for family in ("llama", "gpt_oss")]


@pytest.mark.parametrize("family", ["qwen2", "mixtral", *LONG_FAMILIES])
def test_packages_of_a_family_give_the_tokens_of_the_dense_model(family: str, tmp_path: Path) -> None:
    """Experts stay dense. qwen2 and gpt_oss have biases."""
    save_model(family, tmp_path / "source")
    pair = save_pair(tmp_path / "source", tmp_path)
    with exported_programs(), registered():
        expected = tokens_of(start(pair.dense, tmp_path / "cache", programs="aot").engine)
        first = start(pair.quantised, tmp_path / "cache", programs="aot")
        assert first.engine.runner.has_model and tokens_of(first.engine) == expected
        again = start(pair.quantised, tmp_path / "cache", programs="aot")
        assert not again.engine.runner.has_model and outcomes(again) == [("hit", 0)] * 2
        assert tokens_of(again.engine) == expected
        assert again.weights_read.num_bytes == first.weights_read.num_bytes <= first.plan.weight_bytes


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def small_start(small: Pair, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Any:
    """The packages call the op, so a kernel that is replaced later runs in them."""
    with exported_programs(), registered():
        return start(small.quantised, tmp_path_factory.mktemp("cache"), programs="aot", dtype=request.param)


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_kernel_with_a_mistake_fails_the_parity_check(fault: str, small_start: Any) -> None:
    """The reference is computed with the kernel too, in case it does not dequantise."""
    runner, planned = small_start.engine.runner, small_start.planned
    expectation = pytest.raises(CompileError, match=FAILED) if fault else nullcontext()
    with registered(FAULTS[fault]) if fault else registered():
        checker = ParityChecker(runner, planned.architecture, planned.config)
        for bucket in planned.plan.buckets:
            with expectation:
                warm_bucket(runner, bucket, PreviousRun(), checker, small_start.cache_dir)


def test_cache_keys_depend_on_the_sources_of_schemes() -> None:
    assert {"kernels/linear/scheme_linear.py", "kernels/linear/ops.py"} <= post_grad.op_source_digests().keys()
    assert "models/convert/scheme_linear.py" in aot.HASHED_FILES
