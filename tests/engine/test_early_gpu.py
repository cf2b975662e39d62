"""What runs on the GPU in advance: kernels are compiled in uncounted steps, and errors do not end the start."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tcdeploy.engine.step.batch import GraphKey
from tcdeploy.engine.warm import early_gpu
from tcdeploy.engine.warm.early_gpu import precompile_kernels, start_initializing_gpu
from tcdeploy.planning.plan import Bucket
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start import packages
from tcdeploy.start.planned import StartRequest
from tests.conftest import TINY

BUCKET = Bucket("prefill", 2048)


class Runner:
    """Records steps, and whether they count as those of requests."""

    def __init__(self, is_eager: bool = False) -> None:
        self.plan = SimpleNamespace(uses_cuda_graph=lambda bucket: True)
        self.eager_buckets = {BUCKET} if is_eager else set()
        keys = [GraphKey(BUCKET, tokens, slots) for tokens in (2048, 512, 64) for slots in (32, 0)]
        self.graphs = SimpleNamespace(early_keys=lambda bucket: keys)
        self.row_assignment = SimpleNamespace(clear=lambda: self.steps.append("cleared"))
        self.steps: list[object] = []
        self.counts = True
        self.filled_state: str | None = None

    @contextlib.contextmanager
    def uncounted_steps(self) -> Iterator[None]:
        self.counts = False
        yield
        self.counts = True

    def run_uncaptured(self, key: GraphKey) -> None:
        assert not self.counts
        self.steps.append((key.tokens, key.row_slots))

    def launch_sampling_kernels(self) -> None:
        assert not self.counts
        self.steps.append("sampling")


@pytest.fixture(autouse=True)
def check_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(runner: Any, bucket: Bucket, prompts: Any) -> None:
        assert not runner.counts and runner.filled_state is None
        runner.steps.append(prompts)
        runner.filled_state = "filled"

    monkeypatch.setattr(early_gpu, "run_check_steps", run)


def test_the_largest_and_smallest_early_sizes_are_run_with_and_without_rows() -> None:
    runner: Any = Runner()
    precompile_kernels(runner, [BUCKET], "prompts")  # type: ignore[arg-type]
    assert runner.steps == ["prompts", (2048, 32), (2048, 0), (64, 32), (64, 0), "sampling", "cleared"]


def test_launches_that_only_compile_fill_no_state() -> None:
    runner: Any = Runner()
    precompile_kernels(runner, [BUCKET, BUCKET], "prompts")  # type: ignore[arg-type]
    assert runner.steps.count("prompts") == 2 and runner.filled_state is None


def test_eager_buckets_have_no_graphs() -> None:
    runner: Any = Runner(is_eager=True)
    precompile_kernels(runner, [BUCKET], "prompts")  # type: ignore[arg-type]
    assert runner.steps == ["prompts", "sampling", "cleared"]


def test_an_error_is_logged_and_the_rows_are_cleared(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(early_gpu, "run_check_steps", fail)
    caplog.set_level("INFO", "tcdeploy.engine")
    runner: Any = Runner()
    precompile_kernels(runner, [BUCKET], "prompts")  # type: ignore[arg-type]
    assert runner.steps == ["cleared"] and "no memory" in caplog.text


def test_the_operators_run_on_any_device() -> None:
    early_gpu._use_libraries(torch.device("cpu"))


def test_an_error_is_left_to_the_start(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError(f"{threading.current_thread().name}: no memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(early_gpu, "_use_libraries", fail)
    with caplog.at_level(logging.DEBUG):
        start_initializing_gpu()()
    assert "gpu-initialization: no memory" in caplog.text


def test_a_process_initialises_its_gpu_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second model's start would leave another workspace of cuBLAS in the GPU's memory."""
    calls: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(calls))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(early_gpu, "_use_libraries", calls.append)
    for _ in range(2):
        start_initializing_gpu()()
    assert calls == [torch.device("cuda")]


def test_a_second_start_waits_for_the_thread_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start from packages that finds no record does not wait. The start with the model's code that follows does."""
    running, calls = threading.Event(), list[torch.device]()

    def use_libraries(device: torch.device) -> None:
        running.wait(10)
        calls.append(device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # not yet
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(early_gpu, "_use_libraries", use_libraries)
    start_initializing_gpu()
    wait = start_initializing_gpu()
    assert calls == []
    running.set()
    wait()
    assert calls == [torch.device("cuda")]


def test_products_that_fail_in_advance_do_not_end_the_start(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "tcdeploy.engine")
    with early_gpu.loading_products({(8, 4)}, 2, "no dtype"):  # type: ignore[arg-type]
        pass
    assert "products were not loaded in advance" in caplog.text


def test_products_are_those_of_both_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype))
    monkeypatch.setattr(early_gpu.functional, "linear", lambda x, w: calls.append((*x.shape, *w.shape, x.dtype)))
    monkeypatch.setattr(early_gpu, "split_gemm", lambda x, w: calls.append((*x.shape, *w.shape, x.dtype)))
    with early_gpu.loading_products({(8, 4)}, 2, torch.bfloat16):
        pass
    assert calls == [(1, 2, 4, 8, 4, torch.bfloat16), (2, 4, 4, 8, torch.float32)]


def test_a_start_without_a_record_does_not_wait_for_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start with the model's code follows, and imports it while the GPU is initialised."""
    wait = mock.Mock()
    monkeypatch.setattr(packages, "start_initializing_gpu", lambda: wait)
    recipe = Recipe(model=TINY, programs="aot", cache_dir=str(tmp_path))
    assert packages.start_from_packages(StartRequest(recipe)) is None
    wait.assert_not_called()
