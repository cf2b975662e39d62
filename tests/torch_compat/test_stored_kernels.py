"""Stored kernels: they are found by Triton's own rules, and launched with the arguments that Triton would pass."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tcdeploy.kernels.attention import decode, prefill
from tcdeploy.kernels.linear import gemv, skinny_gemm
from tcdeploy.kernels.linear.tile_configs import GEMV_TILES, SKINNY_GEMM_TILES
from tcdeploy.kernels.sampling import advance_triton
from tcdeploy.torch_compat.triton import kernel as triton_kernel
from tcdeploy.torch_compat.triton import stored_kernels
from tcdeploy.torch_compat.triton.cuda_driver import DriverError
from tcdeploy.torch_compat.triton.kernel import Kernel, record_kernels, use_stored_kernels
from tcdeploy.torch_compat.triton.stored_kernels import KernelRecorder, StoredKernels, launch_key

pytest.importorskip("triton")
from tests.triton_tools import Launch, compile_for_hopper, record_launches, specialization_key

HEADS, KV_HEADS, DIM, BLOCKS, BLOCK_SIZE = 8, 2, 64, 9, 16


@pytest.fixture(autouse=True)
def no_stored_kernels() -> Any:
    yield
    use_stored_kernels(None)
    triton_kernel._recorder = None


def random(*shape: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(device)


def write(device: str, tokens: int = 3, dim: int = DIM, offset: int = 0) -> list[Tensor]:
    """`offset`: of the first element of k, in elements."""
    k = random(tokens * KV_HEADS * dim + offset, device=device)[offset:].view(tokens, KV_HEADS, dim)
    caches = [torch.zeros(BLOCKS, BLOCK_SIZE, KV_HEADS, dim, dtype=k.dtype, device=device) for _ in range(2)]
    prefill.write_kv(k, k, *caches, torch.arange(tokens, device=device))
    return caches


def attend_decode(device: str, batch: int = 2, splits: int = 2, window: int = 0, softcap: float = 0.0) -> list[Tensor]:
    cache = random(BLOCKS, BLOCK_SIZE, KV_HEADS, DIM, device=device)
    q, k = random(batch, HEADS, DIM, device=device), random(batch, KV_HEADS, DIM, device=device)
    table = torch.arange(1, 1 + 2 * batch, device=device, dtype=torch.int32).view(batch, 2)
    lengths = torch.full((batch,), 20, device=device, dtype=torch.int32)
    counters = torch.zeros(batch, KV_HEADS, device=device, dtype=torch.int32)
    caches = cache.clone(), cache.clone()
    out = decode.paged_decode(q, k, k, *caches, table, lengths, counters, 0.125, window, softcap, None, splits)
    return [out, *caches]


def attend_prefill(device: str, tokens: int = 30, softcap: float = 0.0) -> list[Tensor]:
    cache = random(BLOCKS, BLOCK_SIZE, KV_HEADS, DIM, device=device)
    q = random(tokens, HEADS, DIM, device=device)
    table = torch.arange(1, 5, device=device, dtype=torch.int32).view(2, 2)
    starts = torch.tensor([0, 10, tokens], device=device, dtype=torch.int32)
    lengths = torch.tensor([10, tokens - 10], device=device, dtype=torch.int32)
    return [prefill.paged_prefill(q, cache, cache, table, starts, lengths, 0.125, 0, softcap, None)]


def multiply(device: str, rows: int = 1, with_bias: bool = False) -> list[Tensor]:
    x, w = random(rows, 256, device=device), random(128, 256, device=device)
    bias = random(128, device=device) if with_bias else None
    if rows == 1:
        return [gemv.matmul(x, w, GEMV_TILES[0], bias)]
    return [skinny_gemm.matmul(x, w, SKINNY_GEMM_TILES[0], bias)]


def end_step(device: str, rows: int = 2, vocab: int = 5000) -> list[Tensor]:
    columns = [torch.zeros(rows + 1, dtype=dtype, device=device) for dtype in (torch.int64, torch.int64, torch.int32)]
    lengths = torch.ones(rows, dtype=torch.int32, device=device)
    logits = random(rows, vocab, device=device)
    return [advance_triton.advance(logits, torch.arange(rows, device=device), lengths, *columns), *columns]


CALLS: dict[str, Callable[[str], list[Tensor]]] = {
    "write": write,
    "write one token": lambda device: write(device, tokens=1),
    "write unaligned keys": lambda device: write(device, offset=1),
    "write other strides": lambda device: write(device, dim=40),
    "write small heads": lambda device: write(device, dim=17),
    "decode": attend_decode,
    "decode, batch 1": lambda device: attend_decode(device, batch=1, splits=1),
    "decode, 3 splits": lambda device: attend_decode(device, splits=3),
    "decode, window": lambda device: attend_decode(device, window=16),
    "decode, softcap": lambda device: attend_decode(device, softcap=30.0),
    "prefill": attend_prefill,
    "prefill, more tokens": lambda device: attend_prefill(device, tokens=32),
    "prefill, softcap": lambda device: attend_prefill(device, softcap=30.0),
    "gemv": multiply,
    "gemv with bias": lambda device: multiply(device, with_bias=True),
    "skinny gemm": lambda device: multiply(device, rows=2),
    "skinny gemm, 16 rows": lambda device: multiply(device, rows=16),
    "skinny gemm with bias": lambda device: multiply(device, rows=5, with_bias=True),
    "end of a step": end_step,
    "end of a step, one row": lambda device: end_step(device, rows=1),
}


def recorded_launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    launches = record_launches(monkeypatch)
    for call in CALLS.values():
        call("cpu")
    return launches


def specializations_of(launch: Launch) -> str:
    return "".join(map(stored_kernels._specialization, launch.kernel.params))


def test_two_launches_have_one_key_exactly_if_triton_compiles_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = recorded_launches(monkeypatch)
    keys = [
        (item.kernel.fn.__name__, launch_key(specializations_of(item), item.args, item.options)) for item in launches
    ]
    specializations = [(*specialization_key(item), str(item.options)) for item in launches]
    assert 12 < len(set(keys)) < len(keys)
    for first, second in combinations(range(len(launches)), 2):
        assert (keys[first] == keys[second]) == (specializations[first] == specializations[second]), keys[first]


class DriverCall(NamedTuple):
    grid: tuple[int, ...]
    num_warps: int
    uses_pdl: bool
    values: list[int]  # the first 8 bytes of each argument


class FakeKernel:
    """Stands in for LoadedKernel."""

    loaded: list[FakeKernel] = []

    def __init__(self, cubin: bytes, name: str, shared_bytes: int, device: int) -> None:
        self.cubin, self.name, self.shared_bytes = cubin, name, shared_bytes
        self.calls: list[DriverCall] = []
        self.loaded.append(self)

    def launch(self, grid: Any, num_warps: int, uses_pdl: bool, stream: int, arguments: Any) -> None:
        values = [ctypes.c_int64.from_address(address).value for address in arguments]
        self.calls.append(DriverCall(grid, num_warps, uses_pdl, values))


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> type[FakeKernel]:
    monkeypatch.setattr(FakeKernel, "loaded", [])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return FakeKernel


def record(launches: list[Launch]) -> str:
    """The file of these launches."""
    recorder = KernelRecorder()
    for item in launches:
        recorder.add(item.kernel.fn.__name__, item.kernel, item.args, item.options, compile_for_hopper(item))
    return recorder.to_json()


def test_a_stored_kernel_gets_the_arguments_that_are_not_compiled_in(
    monkeypatch: pytest.MonkeyPatch, fake_gpu: type[FakeKernel], tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    write("cpu")
    kernels = StoredKernels(record(launches), load=fake_gpu)
    args, compiled = launches[0].args, compile_for_hopper(launches[0])
    assert kernels.launch("_write_kernel", (3, 1), args, launches[0].options)
    assert kernels.launch("_write_kernel", (4,), args, launches[0].options)
    [kernel] = fake_gpu.loaded
    assert (kernel.cubin, kernel.name, kernel.shared_bytes) == (compiled.asm["cubin"], "_write_kernel", 0)
    passed = [arg for arg, kind in zip(args, compiled.src.signature.values(), strict=True) if kind != "constexpr"]
    assert len(passed) == 9, "five pointers and four strides"
    expected = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in passed]
    scratch = [0, 0]
    assert [call.values for call in kernel.calls] == [expected + scratch] * 2
    assert [call.grid for call in kernel.calls] == [(3, 1, 1), (4, 1, 1)]
    assert {(call.num_warps, call.uses_pdl) for call in kernel.calls} == {(prefill.WRITE_WARPS, False)}


def test_numbers_are_passed_in_the_types_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, fake_gpu: type[FakeKernel], tmp_path: Path
) -> None:
    """The softcap's scales are float32, and a decode kernel that was compiled with PDL is launched with it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(decode, "supports_pdl", lambda device: True)
    launches = record_launches(monkeypatch)
    attend_decode("cpu", softcap=30.0)
    kernels = StoredKernels(record(launches), load=fake_gpu)
    [item] = launches
    assert kernels.launch("_decode_kernel", (2, 2, 2), item.args, item.options)
    [[call]] = [kernel.calls for kernel in fake_gpu.loaded]
    assert call.uses_pdl
    names = [param.name for param in item.kernel.params]
    signature = compile_for_hopper(item).src.signature
    passed = [name for name in names if signature[name] != "constexpr"]
    value = call.values[passed.index("scale_log2")]
    expected = item.args[names.index("scale_log2")]
    assert ctypes.c_float.from_buffer_copy(ctypes.c_int32(value)).value == pytest.approx(expected, rel=1e-6)
    assert fake_gpu.loaded[0].shared_bytes == compile_for_hopper(item).metadata.shared > 0


@pytest.fixture
def launches_beside_stored(monkeypatch: pytest.MonkeyPatch, fake_gpu: type[FakeKernel], tmp_path: Path) -> list[Launch]:
    """The launches that go through Triton. The kernel of `write` is stored, and in use."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    write("cpu")
    use_stored_kernels(StoredKernels(record(launches), load=fake_gpu))
    launches.clear()
    return launches


def test_a_launch_that_no_stored_kernel_fits_goes_through_triton(
    launches_beside_stored: list[Launch], fake_gpu: type[FakeKernel]
) -> None:
    launches = launches_beside_stored
    write("cpu")
    assert not launches
    write("cpu", dim=40)
    attend_prefill("cpu")
    assert [item.kernel.fn.__name__ for item in launches] == ["_write_kernel", "_prefill_kernel"]
    assert [len(kernel.calls) for kernel in fake_gpu.loaded] == [1]


def test_triton_is_prepared_before_a_launch_that_no_stored_kernel_fits(
    monkeypatch: pytest.MonkeyPatch, fake_gpu: type[FakeKernel], tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    write("cpu")
    events: list[str] = []
    kernels = StoredKernels(record(launches), load=fake_gpu)
    use_stored_kernels(kernels, prepare_triton=lambda: events.append(f"after {len(launches)} launches"))
    launches.clear()
    write("cpu")
    assert not events
    write("cpu", dim=40)
    write("cpu", dim=40)
    assert events == ["after 0 launches"] and len(launches) == 2


def test_recording_ends_the_use_of_stored_kernels(
    launches_beside_stored: list[Launch], fake_gpu: type[FakeKernel]
) -> None:
    """Otherwise the record of a second start would lack the kernels that the first one had stored."""
    recorder = record_kernels()
    write("cpu")
    assert len(launches_beside_stored) == 1
    assert not fake_gpu.loaded
    assert recorder.to_json() == "", "the interpreter compiles nothing"


@pytest.mark.parametrize("field", list(stored_kernels.UNSUPPORTED))
def test_a_kernel_that_needs_more_than_a_plain_launch_is_not_recorded(
    field: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = record_launches(monkeypatch)
    write("cpu")
    [item] = launches
    compiled = compile_for_hopper(item)
    for value, is_recorded in ((getattr(compiled.metadata, field), True), (2, False)):
        compiled.metadata = compiled.metadata._replace(**{field: value})
        recorder = KernelRecorder()
        recorder.add("kernel", item.kernel, item.args, item.options, compiled)
        assert bool(recorder.to_json()) == is_recorded


def test_a_kernel_of_another_triton_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = record_launches(monkeypatch)
    write("cpu")
    recorder = KernelRecorder()
    recorder.add("kernel", launches[0].kernel, launches[0].args, {}, SimpleNamespace(name="kernel"))
    assert recorder.to_json() == ""


@pytest.mark.parametrize("text", ["", "{}", "[1]", json.dumps({"schema": 0, "kernels": {}})])
def test_another_file_is_refused(text: str) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        StoredKernels(text)


@pytest.mark.gpu
def test_stored_kernels_give_the_results_of_triton() -> None:
    recorder = record_kernels()
    expected = {name: call("cuda") for name, call in CALLS.items()}
    text = recorder.to_json()
    used: list[str] = []

    class Kernels(StoredKernels):
        def launch(self, name: str, *rest: Any) -> bool:
            is_stored = super().launch(name, *rest)
            used.append(name) if is_stored else pytest.fail(f"{name} is not stored")
            return is_stored

    use_stored_kernels(Kernels(text))
    for name, call in CALLS.items():
        for tensor, reference in zip(call("cuda"), expected[name], strict=True):
            torch.testing.assert_close(tensor, reference, rtol=0, atol=0, msg=name)
    assert len(used) > len(CALLS)
    assert {kernel.name for kernel in kernels_of_this_package()} == set(used)


def kernels_of_this_package() -> list[Kernel]:
    return [
        decode.KERNEL, prefill.KERNEL, prefill.WRITE_KERNEL, gemv.KERNEL, skinny_gemm.KERNEL,
        advance_triton.ARGMAX, advance_triton.ADVANCE,
    ]  # fmt: skip


@pytest.mark.gpu
def test_the_driver_reports_a_kernel_that_it_cannot_load() -> None:
    torch.zeros(1, device="cuda")
    with pytest.raises(DriverError, match=r"cannot load kernel: CUDA_ERROR_\w+"):
        stored_kernels.LoadedKernel(b"no cubin" * 100, "kernel", 0, 0)


def test_launching_kernels_imports_no_triton() -> None:
    """The modules that prepare launches are imported by every start from packages."""
    names = (
        "kernels.attention.backends",
        "kernels.attention.mixed",
        "kernels.experts.ops",
        "kernels.linear.ops",
        "engine.step.advance",
        "torch_compat.triton.kernel",
    )
    code = "; ".join(f"import tcdeploy.{name}" for name in names) + "; import sys; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
