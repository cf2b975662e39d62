"""Descriptions of GPUs that this machine does not have: the files, their checks, and plans made from them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.errors import UsageError
from tcdeploy.planning.gpu_description import (
    MIN_CUDA,
    describe_first_gpu,
    gpu_names,
    read_gpu_description,
    with_target_gpu,
)
from tcdeploy.planning.plan import make_plan
from tests.machines import A10G, H100, LAPTOP, LLAMA_8B, make_recipe

# From the data sheets: compute capability, multiprocessors, memory in GB, and memory bandwidth in GB/s.
DATA_SHEETS = {
    "a100": ((8, 0), 108, 80, 2039),
    "a100-40gb": ((8, 0), 108, 40, 1555),
    "a10g": ((8, 6), 80, 24, 600),
    "b200": ((10, 0), 148, 192, 8000),
    "h100": ((9, 0), 132, 80, 3350),
    "h100-nvl": ((9, 0), 132, 94, 3938),
    "h100-pcie": ((9, 0), 114, 80, 2039),
    "h200": ((9, 0), 132, 141, 4800),
    "l4": ((8, 9), 58, 24, 300),
    "l40s": ((8, 9), 142, 48, 864),
    "rtx-4090": ((8, 9), 128, 24, 1008),
}
# By compute capability, as in the CUDA programming guide: threads per multiprocessor, and KiB of shared memory per
# multiprocessor and per block.
PER_MULTIPROCESSOR = {
    (8, 0): (2048, 164, 163), (8, 6): (1536, 100, 99), (8, 9): (1536, 100, 99), (9, 0): (2048, 228, 227),
    (10, 0): (2048, 228, 227),
}  # fmt: skip


def test_every_file_is_in_the_table_of_data_sheets() -> None:
    assert gpu_names() == sorted(DATA_SHEETS)


@pytest.mark.parametrize("name", DATA_SHEETS)
def test_a_file_agrees_with_the_data_sheet(name: str) -> None:
    capability, multiprocessors, memory_gb, bandwidth_gb = DATA_SHEETS[name]
    gpu = read_gpu_description(name)
    assert (gpu.capability, gpu.multiprocessors) == (capability, multiprocessors)
    assert 0.9 * memory_gb <= gpu.memory_bytes / 2**30 <= 1.02 * memory_gb
    transfers_per_cycle = 2  # of the clock that the driver reports
    gb_per_second = transfers_per_cycle * gpu.memory_clock_mhz * 1e6 * gpu.memory_bus_bits / 8 / 1e9
    assert gb_per_second == pytest.approx(bandwidth_gb, rel=0.03)
    threads, shared, shared_per_block = PER_MULTIPROCESSOR[capability]
    assert gpu.threads_per_multiprocessor == threads and gpu.registers_per_multiprocessor == 64 << 10
    assert gpu.shared_bytes_per_multiprocessor == shared << 10 and gpu.shared_bytes_per_block == shared_per_block << 10


@pytest.mark.parametrize(("name", "machine"), [("h100", H100), ("a10g", A10G)])
def test_a_file_has_the_values_that_torch_reports_on_a_machine_with_the_gpu(name: str, machine: Any) -> None:
    gpu = read_gpu_description(name).gpu
    [own] = machine.gpus
    assert dataclasses.replace(gpu, memory_bytes=own.memory_bytes) == own
    assert gpu.memory_bytes <= own.memory_bytes


def test_a_description_is_read_from_a_file(tmp_path: Path) -> None:
    description = dataclasses.replace(read_gpu_description("l4"), name="NVIDIA L9", multiprocessors=7)
    path = tmp_path / "l9.json"
    path.write_text(description.to_json())
    assert read_gpu_description(str(path)) == description


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="no GPU is called 'h1000'") as caught:
        read_gpu_description("h1000")
    assert "h100, h100-nvl" in caught.value.hint and "--describe-gpu" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"capability": [9, 9]}, "compute capability 9.9 does not exist"),
        ({"capability": [7, 5]}, "below 8.0"),
        ({"memory_bytes": 0}, "memory_bytes is 0"),
        ({"multiprocessors": "132"}, "multiprocessors"),
        ({"name": ""}, "its name is ''"),
        ({"name": "H100\x1b[31m"}, "its name is 'H100\\x1b[31m'"),
        ({"cuda": "13"}, "cuda is '13', and the GPU requires 11.8 or newer"),
        ({"cuda": "11.7"}, "cuda is '11.7', and the GPU requires 11.8 or newer"),
        ({"cores": 5}, "cores"),
    ],
)
def test_a_file_that_describes_no_gpu_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({**json.loads(read_gpu_description("h100").to_json()), **changes}))
    with pytest.raises(UsageError, match="does not describe a GPU") as caught:
        read_gpu_description(str(path))
    assert problem in caught.value.message


def test_a_file_without_a_description_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_gpu_description(str(tmp_path / "none.json"))
    for text in ("{", "[" * 100_000):
        (tmp_path / "text.json").write_text(text)
        with pytest.raises(UsageError, match="does not describe a GPU"):
            read_gpu_description(str(tmp_path / "text.json"))
    with pytest.raises(UsageError, match="does not describe a GPU: .* Is a directory"):
        read_gpu_description(f"{tmp_path}/")


def test_names_that_are_no_file_names_are_refused() -> None:
    for name in ("x" * 300, "a\0b"):
        with pytest.raises(UsageError, match="no GPU is called"):
            read_gpu_description(name)
        with pytest.raises(UsageError, match="does not exist"):
            read_gpu_description(f"{name}.json")


def test_the_plan_of_a_target_is_that_of_the_machine_with_the_gpu() -> None:
    target = read_gpu_description("h100")
    machine = dataclasses.replace(H100, gpus=(target.gpu,))
    assert machine.cuda
    here = dataclasses.replace(machine, gpus=LAPTOP.gpus, cuda="", driver="", cpu=LAPTOP.cpu, cpu_threads=8)
    planned = make_plan(make_recipe(cache_dir="/c"), with_target_gpu(here, target, machine.cuda), LLAMA_8B)
    assert planned == make_plan(make_recipe(cache_dir="/c"), machine, LLAMA_8B)
    assert planned.device == "cuda" and planned.is_hopper


def test_plans_for_models_of_a_gpu_have_different_keys() -> None:
    keys = {
        make_plan(make_recipe(), with_target_gpu(LAPTOP, read_gpu_description(name), "13.0"), LLAMA_8B).key
        for name in ("h100", "h100-pcie", "h200")
    }
    assert len(keys) == 3


def test_torch_for_cpus_is_planned_as_torch_for_the_described_cuda_version() -> None:
    target = read_gpu_description("h100")
    assert with_target_gpu(LAPTOP, target, "").cuda == target.cuda
    assert with_target_gpu(LAPTOP, target, "12.9").cuda == "12.9"


def test_a_gpu_that_is_newer_than_the_cuda_version_of_torch_is_refused() -> None:
    target = read_gpu_description("b200")
    with pytest.raises(UsageError, match="torch is built for CUDA 12.6, and NVIDIA B200 requires CUDA 12.8"):
        with_target_gpu(LAPTOP, target, "12.6")
    with_target_gpu(LAPTOP, target, "12.8")
    assert all(read_gpu_description(name).capability in MIN_CUDA for name in gpu_names())


def test_a_machine_without_a_gpu_cannot_describe_one() -> None:
    with pytest.raises(UsageError, match="torch sees no GPU"):
        describe_first_gpu(LAPTOP)
