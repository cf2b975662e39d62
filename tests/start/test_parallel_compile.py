"""Cold starts that compile buckets in several processes, and the rule by which a start does so."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from tcdeploy.errors import Interrupted
from tcdeploy.planning.plan import make_plan
from tcdeploy.start.planned import PlannedModel
from tcdeploy.start.workers import parallel as parallel_compile
from tcdeploy.start.workers.parallel import (
    CORES_PER_PROCESS,
    MAX_WORKERS,
    MIN_WEIGHT_BYTES,
    OneProcess,
    ShortCopy,
    count_spare_bytes,
    share_buckets,
    start_workers,
)
from tests.compile_workers import compile_workers, wait_until_ended
from tests.conftest import PACKAGE_FLAGS, TINY, TINY_FLAGS, RunCLI, cli_environment, remove_headers
from tests.fork_server import ForkServer
from tests.machines import GIB, H100, LLAMA_8B, make_recipe

PREFIX = "warning: a compile worker did not compile "
# The rule does not use workers for a model as small as the embedded one. Prints how each bucket was compiled.
TWO_WORKERS = """
import sys
from tcdeploy.start.workers import parallel as parallel_compile
parallel_compile.MIN_WEIGHT_BYTES = 0
parallel_compile.HOST_BYTES_PER_PROCESS = 1
parallel_compile.count_cores = lambda: 3 * parallel_compile.CORES_PER_PROCESS
wait_for = parallel_compile.CompileWorkers.wait_for
def print_outcome(workers, bucket, progress):
    compilation = wait_for(workers, bucket, progress)
    print("waited:", bucket.name, compilation and compilation.outcome, file=sys.stderr)
    return compilation
parallel_compile.CompileWorkers.wait_for = print_outcome
"""
FAILING_WORKERS = f"""{TWO_WORKERS}
from tcdeploy.start.workers import process as compile_process
compile_process.COMMAND = "raise SystemExit('a planted fault')"
"""
WORKERS_WITHOUT_A_BUCKET = f"""{TWO_WORKERS}
import dataclasses
worker_recipe = parallel_compile.worker_recipe
parallel_compile.worker_recipe = lambda *arguments: dataclasses.replace(worker_recipe(*arguments), batch_sizes=(1,))
"""
THREE_BUCKETS = ("--buckets", "32", "--batch-sizes", "1,4")


@pytest.fixture
def warm(fork_server: ForkServer, tmp_path: Path) -> Any:
    """Run `tcdeploy warm` after a script, and return its stderr and its buckets by name."""

    def run(script: str, *flags: str) -> tuple[list[str], dict[str, Any]]:
        environ = cli_environment(tmp_path)
        arguments = ("warm", TINY, "--programs", "jit", *flags, "--cache-dir", str(tmp_path / "cache"), "--json")
        done = fork_server.run(*arguments, environ=environ, script=script)
        assert done.returncode == 0, done.stderr
        buckets = {bucket["bucket"]: bucket for bucket in json.loads(done.stdout)["buckets"]}
        return done.stderr.splitlines(), buckets

    if not fork_server.supports(cli_environment(tmp_path)):
        pytest.skip("needs the fork server")
    return run


def lines_with(lines: list[str], word: str) -> list[str]:
    return [line for line in lines if word in line]


def manifest_of(cache: Path) -> dict[str, Any]:
    [path] = cache.glob("manifests/*.json")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def test_workers_compile_all_but_the_largest_bucket_and_the_start_records_misses(
    warm: Any, run_cli: RunCLI, tmp_path: Path, filled_cache: Path
) -> None:
    cache = tmp_path / "cache"
    stderr, buckets = warm(TWO_WORKERS, *TINY_FLAGS)
    waited = [line.removeprefix("waited: ") for line in lines_with(stderr, "waited: ")]
    assert waited == ["prefill:128 None", "prefill:32 miss", "decode:4 miss", "decode:1 miss"]
    assert lines_with(stderr, "warning") == []
    for bucket in buckets.values():
        counts = bucket["outcome"], bucket["cache_hits"], bucket["cache_misses"]
        assert counts == ("miss", 0, bucket["programs"]), "each program was compiled once"
        is_largest = bucket["bucket"] == "prefill:128"
        assert (bucket["cold_seconds"] == bucket["compile_seconds"]) is is_largest
    assert not list(cache.glob(".start-*")), "the folders of the workers are removed"
    remove_headers(cache)
    ours, in_one_process = manifest_of(cache), manifest_of(filled_cache)
    assert ours["plan"]["key"] == in_one_process["plan"]["key"]
    kernels = [
        [file for file in manifest["files"] if file["path"].endswith(".so")] for manifest in (ours, in_one_process)
    ]
    assert len(kernels[0]) == len(kernels[1]) > 3
    tokens = [
        [bucket["greedy_tokens"]["tokens"] for bucket in manifest["buckets"]] for manifest in (ours, in_one_process)
    ]
    assert tokens[0] == tokens[1]
    again = run_cli("warm", TINY, *TINY_FLAGS, "--cache-dir", str(cache), "--require-hit", "--json")
    assert again.returncode == 0, again.stderr
    for bucket in json.loads(again.stdout)["buckets"]:
        assert (bucket["outcome"], bucket["cold_seconds"]) == ("hit", buckets[bucket["bucket"]]["cold_seconds"])


@pytest.mark.long  # each program is compiled in two processes
def test_the_packages_of_the_short_copy_are_those_of_the_model(warm: Any, run_cli: RunCLI, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    stderr, buckets = warm(TWO_WORKERS, *PACKAGE_FLAGS)
    assert lines_with(stderr, "waited: ") == ["waited: prefill:32 None", "waited: decode:4 miss"]
    assert lines_with(stderr, "warning") == []
    prefill, decode = buckets.values()
    assert (prefill["outcome"], prefill["cache_hits"] + prefill["cache_misses"]) == ("miss", 3), (
        "a worker may have compiled some of its packages"
    )
    assert (decode["outcome"], decode["programs"], decode["cache_hits"], decode["cache_misses"]) == ("miss", 3, 0, 3)
    packages = [file["path"] for file in manifest_of(cache)["files"] if file["path"].endswith(".pt2")]
    assert len(packages) == 6
    remove_headers(cache)
    again = run_cli("warm", TINY, *PACKAGE_FLAGS, "--cache-dir", str(cache), "--require-hit", "--json", new=True)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["weights_read"] is not None, "a start from packages"


@pytest.mark.parametrize(
    ("script", "reason", "compiled"),
    [
        (FAILING_WORKERS, "a planted fault", ["decode:4", "decode:1"]),
        pytest.param(
            WORKERS_WITHOUT_A_BUCKET, "its plan does not contain these buckets", ["decode:4"], marks=pytest.mark.long
        ),
    ],
)
def test_buckets_of_a_worker_that_fails_are_compiled_in_the_first_process_with_a_warning(
    script: str, reason: str, compiled: list[str], warm: Any, run_cli: RunCLI, tmp_path: Path
) -> None:
    stderr, buckets = warm(script, *THREE_BUCKETS)
    warnings = lines_with(stderr, "warning: ")
    assert all(reason in line for line in warnings)
    starts = [line.partition(", so this process does: ")[0] for line in warnings]
    names = [name for start in starts for name in start.removeprefix(PREFIX).split(", ")]
    assert sorted(names) == sorted(compiled), "each bucket is named once"
    assert {bucket["outcome"] for bucket in buckets.values()} == {"miss"}
    remove_headers(tmp_path / "cache")
    again = run_cli("warm", TINY, *THREE_BUCKETS, "--cache-dir", str(tmp_path / "cache"), "--require-hit")
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_the_first_process(number: signal.Signals, fork_server: ForkServer, tmp_path: Path) -> None:
    environ = cli_environment(tmp_path)
    if not fork_server.supports(environ):
        pytest.skip("needs the fork server")
    arguments = ("warm", TINY, *TINY_FLAGS, "--programs", "jit", "--cache-dir", str(tmp_path / "cache"))
    process = fork_server.popen(*arguments, environ=environ, script=TWO_WORKERS)
    deadline = time.monotonic() + 60
    while len(workers := compile_workers(process.pid)) < 2:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)  # they register for the end of their parent
    os.kill(process.pid, number)
    code = process.wait(timeout=120)  # on a busy machine; it has taken more than 20 s
    assert process.stderr is not None
    assert code == {signal.SIGINT: Interrupted.exit_code}.get(number, -number), process.stderr.read()
    wait_until_ended(workers)


RECIPE = {"context": 8192, "buckets": (2048,), "batch_sizes": (1, 32)}
COPY = ShortCopy({}, num_layers=2, weight_bytes=3 * GIB)


def shares(
    cores: int = 16, spare_bytes: int = 25 * GIB, host_bytes: int = 128 * GIB, **options: Any
) -> list[list[str]] | OneProcess:
    recipe = make_recipe(**{**RECIPE, **options})
    return share_buckets(recipe, make_plan(recipe, H100, LLAMA_8B), COPY, cores, spare_bytes, host_bytes)


def test_workers_share_the_buckets_but_the_largest_in_the_order_in_which_they_are_warmed() -> None:
    assert shares() == [["decode:32"], ["decode:1"]]
    assert shares(batch_sizes=(1, 4, 16, 32, 64)) == [
        ["decode:64", "decode:4"],
        ["decode:32", "decode:1"],
        ["decode:16"],
    ]
    assert shares(buckets=(512, 2048)) == [["prefill:512"], ["decode:32"], ["decode:1"]]


def test_with_ahead_of_time_programs_the_first_of_several_workers_helps_with_the_largest_bucket() -> None:
    assert shares(programs="aot") == [["prefill:2048"], ["decode:32"], ["decode:1"]]
    assert shares(programs="aot", batch_sizes=(1,)) == [["prefill:2048"], ["decode:1"]]
    assert shares(programs="aot", cores=2 * CORES_PER_PROCESS) == [["decode:32", "decode:1"]]


def test_with_ahead_of_time_programs_and_few_workers_this_process_compiles_more_than_the_largest_bucket() -> None:
    sizes = (1, 4, 16, 32, 64, 128, 256)
    one_worker = shares(programs="aot", batch_sizes=sizes, cores=2 * CORES_PER_PROCESS)
    assert one_worker == [["decode:64", "decode:32", "decode:16", "decode:4", "decode:1"]]
    two_for_decode = shares(programs="aot", batch_sizes=sizes, cores=4 * CORES_PER_PROCESS)
    assert two_for_decode == [
        ["prefill:2048"],
        ["decode:128", "decode:32", "decode:4"],
        ["decode:64", "decode:16", "decode:1"],
    ]
    assert shares(batch_sizes=sizes, cores=2 * CORES_PER_PROCESS)[0][0] == "decode:256"


def test_cores_and_memory_limit_the_number_of_workers() -> None:
    assert shares(cores=3 * CORES_PER_PROCESS - 1) == [["decode:32", "decode:1"]]
    assert shares(cores=2 * CORES_PER_PROCESS - 1) == OneProcess("7 CPU cores; two processes need 8")
    assert shares(spare_bytes=10 * GIB) == [["decode:32", "decode:1"]]
    too_few = shares(spare_bytes=2 * GIB)
    assert isinstance(too_few, OneProcess) and too_few.reason.startswith("2.00 GiB are free beside the model")
    assert shares(host_bytes=8 * GIB) == [["decode:32", "decode:1"]]
    too_few = shares(host_bytes=7 * GIB)
    assert too_few == OneProcess("7.00 GiB of host memory; two processes need 8.00 GiB")
    many = shares(cores=64, spare_bytes=100 * GIB, batch_sizes=(1, 2, 4, 8, 16, 32))
    assert isinstance(many, list) and len(many) == MAX_WORKERS


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tune_seconds": 5.0}, "--tune-seconds"),
        ({"mode": "max-autotune"}, "--mode max-autotune"),
        ({"trust_remote_code": True}, "--trust-remote-code"),
        ({"require_signed": True}, "--require-signed"),
    ],
)
def test_some_options_exclude_workers(options: dict[str, Any], reason: str) -> None:
    result = shares(**options)
    assert isinstance(result, OneProcess) and result.reason.startswith(reason)


def test_weights_that_are_allocated_already_do_not_count_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(make_recipe(**RECIPE), H100, LLAMA_8B)
    spare = []
    for traced in (None, SimpleNamespace(num_bytes=plan.weight_bytes)):
        free_bytes = 79 * GIB - (traced.num_bytes if traced else 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free_bytes=free_bytes: (free_bytes, 80 * GIB))
        planned: Any = SimpleNamespace(plan=plan, environment=H100, traced_model=traced)
        spare.append(count_spare_bytes(planned))
    assert spare == [79 * GIB - plan.weight_bytes - plan.kv_bytes - plan.workspace_bytes] * 2


def test_the_state_slots_of_a_worker_need_memory_too() -> None:
    recipe = make_recipe(**RECIPE)
    plan = dataclasses.replace(make_plan(recipe, H100, LLAMA_8B), slots=33, slot_bytes=20 * GIB)
    result = share_buckets(recipe, plan, COPY, 16, 25 * GIB, 128 * GIB)
    assert isinstance(result, OneProcess) and result.reason.startswith("25.00 GiB are free beside the model")


def test_a_small_model_is_compiled_in_one_process() -> None:
    recipe = make_recipe(**RECIPE)
    plan = make_plan(recipe, H100, LLAMA_8B)
    assert plan.weight_bytes > MIN_WEIGHT_BYTES
    small = dataclasses.replace(plan, weight_bytes=MIN_WEIGHT_BYTES // 2)
    assert share_buckets(recipe, small, COPY, 16, 25 * GIB, 128 * GIB) == OneProcess(
        "the model has 512.0 MiB of weights; workers need 1.00 GiB"
    )


class FakeWorker:
    """Stands in for a CompileProcess. Only `limit` of them can be started."""

    limit = 0
    started: ClassVar[list[FakeWorker]] = []

    def __init__(self, recipe: Any, config: Any, plan_key: str, buckets: list[str]) -> None:
        if len(self.started) == self.limit:
            raise OSError("no process")
        self.buckets, self.is_running = buckets, True
        self.started.append(self)

    def stop(self) -> None:
        self.is_running = False


@pytest.mark.parametrize(("limit", "running"), [(0, 0), (1, 0), (2, 2), (3, 3)])
def test_a_worker_for_packages_alone_is_ended(
    limit: int, running: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeWorker, "limit", limit)
    monkeypatch.setattr(FakeWorker, "started", [])
    monkeypatch.setattr(parallel_compile, "CompileProcess", FakeWorker)
    monkeypatch.setattr(parallel_compile, "make_short_copy", lambda *_: COPY)
    monkeypatch.setattr(parallel_compile, "worker_recipe", lambda *_: None)
    monkeypatch.setattr(parallel_compile, "count_cores", lambda: 16)
    monkeypatch.setattr(parallel_compile, "count_spare_bytes", lambda *_: 25 * GIB)
    recipe = make_recipe(**RECIPE, programs="aot")
    unused: Any = None
    planned = PlannedModel(
        recipe=recipe, environment=H100, architecture=LLAMA_8B, plan=make_plan(recipe, H100, LLAMA_8B),
        generation_defaults=unused, config=unused, fake_model=unused, checkpoint=None, model_decisions=(),
    )  # fmt: skip
    workers = start_workers(planned, unused, unused)
    assert sum(worker.is_running for worker in FakeWorker.started) == running
    assert bool(workers) == (running > 0)
    assert ("no process" in caplog.text) == (limit < 3)
