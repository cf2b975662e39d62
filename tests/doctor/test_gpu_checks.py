"""What is reported about GPUs and drivers, from descriptions of machines."""

from __future__ import annotations

from typing import Any

import pytest

from tcdeploy.doctor.gpu import (
    check_driver,
    check_gpus,
    judge_driver,
    judge_gpu,
    judge_missing_gpu,
    supports_capability,
)
from tcdeploy.doctor.packages import check_transformers, check_triton, judge_bytecode
from tcdeploy.doctor.result import Request, Result
from tcdeploy.doctor.torch_probe import TorchProbe

GIB = 1 << 30
SM = ["sm_80", "sm_86", "sm_90"]
NO_DRIVER: dict[str, Any] = {"cuda": None, "gpus": [], "error": "", "processes": []}


def driver(used_mib: str = "4", **more: Any) -> dict[str, Any]:
    row = {
        "uuid": "GPU-1",
        "name": "H100",
        "driver_version": "580.95",
        "memory.total": "81559",
        "memory.used": used_mib,
    }
    return {**NO_DRIVER, "cuda": [13, 0], "gpus": [row], **more}


def described(capability: tuple[int, int] = (9, 0), free: int = 79 * GIB, count: int = 1) -> dict[str, Any]:
    gpu = {"name": "H100", "capability": list(capability), "free": free, "total": 80 * GIB, "uuid": "GPU-1"}
    return {"gpus": [gpu] * count, "problem": "", "architectures": SM}


def test_an_idle_gpu_is_ok() -> None:
    result = judge_gpu(described(count=2), driver(), 0.9)
    assert result.state == "ok"
    assert result.summary == (
        "H100, capability 9.0, 80.00 GiB of 80.00 GiB free; 1 more, which a deployment does not use"
    )


def test_memory_of_other_processes_is_a_finding() -> None:
    busy = driver("20480", processes=[{"gpu_uuid": "GPU-1", "pid": "77", "used_memory": "20480"}])
    result = judge_gpu(described(), busy, 0.9)
    assert (result.state, result.is_blocking) == ("finding", True)
    assert result.summary == (
        "other processes (77) use 20.00 GiB of the memory of H100: 60.00 GiB of 80.00 GiB are free, and a start may "
        "use 90%"
    )
    assert result.cure == "end these processes, or pass --memory-fraction 0.75"
    assert judge_gpu(described(), busy, 0.7).state == "ok"


@pytest.mark.parametrize("rows", [driver("[N/A]"), NO_DRIVER])
def test_without_nvidia_smi_the_memory_is_that_of_torch(rows: dict[str, Any]) -> None:
    assert judge_gpu(described(free=79 * GIB), rows, 0.9).state == "ok"
    assert judge_gpu(described(free=60 * GIB), rows, 0.9).state == "finding"


def test_a_gpu_that_torch_has_no_kernels_for() -> None:
    result = judge_gpu(described((12, 0)), driver(), 0.9)
    assert result.is_blocking and result.summary.startswith(
        "torch has no kernels for H100 (capability 12.0); it has sm_80"
    )
    assert judge_gpu(described((7, 5)), driver(), 0.9).state == "finding"


@pytest.mark.parametrize(
    ("architectures", "capability", "supported"),
    [
        (["sm_80"], (8, 9), True), (["sm_86"], (8, 0), False), (["sm_90"], (10, 0), False),
        (["compute_90"], (10, 0), True), (["compute_120"], (10, 0), False), (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False), (["gfx942"], (9, 4), False), (["sm_120"], (12, 0), True),
    ],
)  # fmt: skip
def test_the_capabilities_that_a_build_supports(
    architectures: list[str], capability: tuple[int, int], supported: bool
) -> None:
    assert supports_capability(architectures, capability) == supported


@pytest.mark.parametrize(
    ("rows", "torch_cuda", "hidden", "state", "text"),
    [
        (NO_DRIVER, "13.0", None, "note", "none: models run on the CPU"),
        (driver(), "13.0", "", "note", "hidden by CUDA_VISIBLE_DEVICES"),
        (driver(), None, None, "finding", "the installed torch is built for CPUs"),
        (driver(), "13.0", None, "finding", "torch cannot use the GPU (H100): no device"),
    ],
)
def test_a_torch_without_a_gpu(
    rows: dict[str, Any], torch_cuda: str | None, hidden: str | None, state: str, text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    result = judge_missing_gpu({"problem": "no device"}, rows, torch_cuda)
    assert result.state == state and text in result.summary


@pytest.mark.parametrize(
    ("supported", "torch_cuda", "state"),
    [([13, 0], "13.0", "ok"), ([13, 1], "12.8", "ok"), ([13, 0], "13.2", "note"), ([12, 8], "13.0", "finding"),
     ([12, 8], None, "ok")],
)  # fmt: skip
def test_the_driver_is_compared_with_torchs_cuda(supported: list[int], torch_cuda: str | None, state: str) -> None:
    result = judge_driver(driver(cuda=supported), torch_cuda)
    assert (result.state, result.is_blocking) == (state, state == "finding")
    assert result.summary.removeprefix("the driver ").startswith(f"580.95, supports CUDA {supported[0]}.{supported[1]}")


def test_a_broken_driver_is_a_finding() -> None:
    result = judge_driver({**NO_DRIVER, "error": "Driver/library version mismatch"}, "13.0")
    assert result.summary == "nvidia-smi fails: Driver/library version mismatch" and result.is_blocking
    assert judge_driver({**NO_DRIVER, "error": "no permission"}, "13.0", is_used=True).state == "note"


def test_a_gpu_that_ends_or_blocks_the_process_is_a_finding() -> None:
    error = TorchProbe({"driver": driver(), "torch": {"cuda": "13.0"}}, {"gpus": "RuntimeError: out of memory"})
    crash = TorchProbe({"driver": driver(), "torch": {"cuda": "13.0"}}, {}, "crashed", "gpus")
    for probe, reason in ((error, "RuntimeError: out of memory"), (crash, "crashed")):
        result = check_gpus(Request(run_probe=lambda probe=probe: probe))
        assert (result.is_blocking, result.summary) == (True, f"torch cannot use the GPU: {reason}")
    transformers = check_transformers(Request(run_probe=lambda: crash))
    assert isinstance(transformers, Result)
    assert (transformers.state, transformers.summary) == ("note", "could not be checked: crashed")
    hanging = TorchProbe({}, {}, "did not finish", "driver")
    assert check_driver(Request(run_probe=lambda: hanging)).is_blocking
    assert check_gpus(Request(run_probe=lambda: hanging)).state == "note"


def test_a_gpu_without_free_memory_has_no_hint_for_a_fraction() -> None:
    result = judge_gpu(described(), driver("79000"), 0.9)
    assert result.cure == "end these processes"


def test_a_gpu_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcdeploy.doctor.packages.installed_version", lambda package: "")
    with_gpu = Request(run_probe=lambda: TorchProbe({"gpus": described()}, {}))
    assert check_triton(with_gpu).is_blocking
    assert check_triton(Request(run_probe=lambda: TorchProbe({}, {}))).state == "note"


def test_the_memory_fraction_is_that_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    sections = {"gpus": described(), "driver": driver("20480"), "torch": {"cuda": "13.0"}}
    request = Request(run_probe=lambda: TorchProbe(sections, {}))
    assert check_gpus(request).state == "finding"
    monkeypatch.setenv("TCDEPLOY_MEMORY_FRACTION", "0.5")
    assert check_gpus(request).state == "ok"


def test_bytecode_that_the_next_start_writes_is_a_note() -> None:
    assert judge_bytecode({"torch": 199}, will_be_written=False).state == "ok"
    assert judge_bytecode({"torch": 150, "sympy": 50}, will_be_written=True).state == "note"
    result = judge_bytecode({"sympy": 50, "torch": 150}, will_be_written=False)
    assert result.state == "finding" and "200 imported modules have no bytecode (torch 150, sympy 50)" in result.summary
