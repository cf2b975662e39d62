"""Tensors that are read from safetensors files into existing ones, compared with what the safetensors package reads."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tcdeploy.engine.step.batch import StepOutput
from tcdeploy.engine.step.step_graphs import capture_graph
from tcdeploy.errors import ModelError
from tcdeploy.models.weights import reader as checkpoint_reader
from tcdeploy.models.weights.reader import Copy, copying_tensors, read_elements, read_tensor, stored_tensors

TENSORS = {
    "matrix": torch.arange(120, dtype=torch.float32).view(10, 12),
    "half": torch.linspace(-3, 3, 77).to(torch.bfloat16),
    "ids": torch.arange(9, dtype=torch.int64),
    "scalar": torch.tensor(2.5),
}


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two shards."""
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file({name: TENSORS[name] for name in ("matrix", "half")}, first, {"format": "pt"})
    save_file({name: TENSORS[name] for name in ("ids", "scalar")}, second)
    return [first, second]


@pytest.mark.parametrize("chunk_bytes", [7, 64, 1 << 20])
def test_tensors_of_all_shards_arrive_whole(
    files: list[Path], chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_reader, "CHUNK_BYTES", chunk_bytes)
    stored = stored_tensors(files)
    targets = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    with copying_tensors(Copy(stored[name], target) for name, target in targets.items()):
        pass
    for name, tensor in TENSORS.items():
        assert torch.equal(targets[name], tensor) and torch.equal(read_tensor(stored[name]), tensor)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_rows_and_other_dtypes_and_results_are_written_too(
    files: list[Path], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_reader, "CHUNK_BYTES", 64)
    stored = stored_tensors(files)
    packed = torch.zeros(20, 12, device=device)
    transposed: Tensor = torch.zeros(12, 10, dtype=torch.bfloat16, device=device)
    as_float: Tensor = torch.zeros(77, device=device)
    copies = [
        Copy(stored["matrix"], packed[5:15]), Copy(stored["half"], as_float),
        Copy(stored["matrix"], transposed, lambda: [read_tensor(stored["matrix"]).T]),
    ]  # fmt: skip
    with copying_tensors(copies):
        pass
    packed, as_float, transposed = packed.cpu(), as_float.cpu(), transposed.cpu()
    assert torch.equal(packed[5:15], TENSORS["matrix"]) and not packed[:5].any() and not packed[15:].any()
    assert torch.equal(transposed, TENSORS["matrix"].T.bfloat16()) and torch.equal(as_float, TENSORS["half"].float())


@pytest.mark.gpu
def test_converted_tensors_may_be_read_during_a_capture(files: list[Path]) -> None:
    """A start from packages captures CUDA graphs while its weights are read."""
    stored, captures = stored_tensors(files)["half"], threading.Event()
    static, target, pool = torch.ones(4, device="cuda"), torch.zeros(77, device="cuda"), torch.cuda.MemPool()

    def read_during_the_capture() -> list[Tensor]:
        assert captures.wait(60)
        return [read_tensor(stored)]

    def step() -> StepOutput:
        captures.set()
        time.sleep(0.5)
        return StepOutput(logits=static * 2, tokens=static, rows=static)

    with copying_tensors([Copy(stored, target, read_during_the_capture)]):
        graph = capture_graph(step, pool)
    assert graph.replay().logits.tolist() == [2] * 4 and torch.equal(target.cpu(), TENSORS["half"].float())


def test_the_first_elements_can_be_read_alone(files: list[Path]) -> None:
    assert read_elements(stored_tensors(files)["matrix"], 0, 5).tolist() == [0, 1, 2, 3, 4]
    assert read_elements(stored_tensors(files)["matrix"], 3, 2).tolist() == [3, 4]


def test_a_file_that_lost_its_end_is_an_error(files: list[Path]) -> None:
    stored = stored_tensors(files)
    with files[0].open("r+b") as file:
        file.truncate(files[0].stat().st_size - 1)
    last = max((stored["matrix"], stored["half"]), key=lambda item: item.end)
    target = torch.zeros(last.shape, dtype=last.dtype)
    with pytest.raises(ModelError, match="ends before its last tensor"), copying_tensors([Copy(last, target)]):
        pass


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 4, (1000).to_bytes(8, "little") + b"{}"])
def test_a_file_without_a_header_is_an_error(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelError, match="no safetensors header"):
        stored_tensors([path])


@pytest.mark.gpu
def test_a_gpu_receives_the_same_bytes(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_reader, "CHUNK_BYTES", 64)
    stored = stored_tensors(files)
    targets = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in TENSORS.items()}
    with copying_tensors(Copy(stored[name], target) for name, target in targets.items()):
        pass
    assert all(torch.equal(targets[name].cpu(), tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize("place", ["in the block", "while it waits"])
def test_after_an_exception_the_rest_is_not_read(
    files: list[Path], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C arrives as an exception in the thread that waits."""
    stored = stored_tensors(files)["matrix"]
    num_reads, release = [0], threading.Event()

    def read(*arguments: object) -> None:
        num_reads[0] += 1
        release.wait(20)

    def interrupt(*arguments: object) -> None:
        while not num_reads[0]:
            time.sleep(0.001)
        threading.Timer(0.1, release.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_reader, "_read", read)
    if place == "while it waits":
        monkeypatch.setattr(checkpoint_reader, "wait", interrupt)
    copies = [Copy(stored, torch.zeros(stored.shape, dtype=stored.dtype)) for _ in range(100)]
    with pytest.raises(KeyboardInterrupt), copying_tensors(copies):
        if place == "in the block":
            interrupt()
    assert num_reads[0] <= checkpoint_reader.THREADS


def test_threads_end_if_not_all_can_be_created(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads wait for each other before they read."""
    stored, submit = stored_tensors(files)["matrix"], checkpoint_reader.ThreadPoolExecutor.submit
    threads: list[threading.Thread] = []

    def submit_two(pool: Any, *arguments: Any) -> Any:
        if len(threads) == 2:
            raise RuntimeError("can't start new thread")
        future = submit(pool, *arguments)
        threads[:] = pool._threads
        return future

    monkeypatch.setattr(checkpoint_reader.ThreadPoolExecutor, "submit", submit_two)
    target = torch.zeros(stored.shape, dtype=stored.dtype)
    with pytest.raises(RuntimeError, match="new thread"), copying_tensors([Copy(stored, target)] * 9):
        pass
    assert len(threads) == 2 and not any(thread.is_alive() for thread in threads)
