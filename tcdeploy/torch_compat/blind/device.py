"""Answers for torch, Triton and Inductor as if the process had a certain GPU.

Where Inductor would time candidates on the GPU, it takes its own first candidate, and `choices` lists that. Autotuner
results of such choices have a negative time, so that no later build takes them for measured ones.
"""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tcdeploy.errors import UsageError
from tcdeploy.planning.gpu_description import GPUDescription
from tcdeploy.torch_compat.blind.cubin import kernel_resources
from tcdeploy.torch_compat.internal import find

MAX_THREADS_PER_BLOCK, WARP_SIZE, STATIC_SHARED_BYTES = 1024, 32, 49152  # of all supported GPUs
HANDLE = 1  # of a module or function that is not loaded
DEVICE_INDEX = 0
UNTIMED_NS = -(10**12)
# Names that fake_cuda.py and launches.py use.
USED_NAMES = (
    "torch._subclasses.fake_tensor:FakeTensorMode.__torch_dispatch__",
    "torch._subclasses.fake_tensor:unset_fake_temporarily",
    "torch.fx.experimental.symbolic_shapes:ShapeEnv",
    "torch.utils._pytree:tree_leaves",
    "torch._inductor.ir:FallbackKernel.codegen",
    "torch._inductor.virtualized:V.graph",
    "torch._inductor.codegen.wrapper:PythonWrapperCodegen.generate_and_run_autotune_block",
    "torch._inductor.sizevars:SizeVarAllocator.optimization_hint",
)
choices: dict[str, None] = {}  # what was chosen without timing it, in order


def pretend(gpu: GPUDescription, libraries: Path) -> None:
    """Give the answers of `gpu` for the rest of this process. Call it before Dynamo and Inductor are imported.

    `libraries`: the folder of the stub of libcuda (linker.py). Raises UsageError if torch lacks a name.
    """
    _replace(_early_answers(gpu))
    importlib.import_module("triton.runtime.driver").driver.set_active(_Driver(gpu))
    _replace(_torch_answers(gpu))
    _replace(_compiler_answers(libraries))
    for path in USED_NAMES:
        _owner(path)
    torch._C._ensureCUDADeviceGuardSet()  # a device guard that does nothing: torch's own, for builds without a GPU


def _replace(answers: dict[str, Any]) -> None:
    """Set "module:attribute.attribute" to a value, each. Raises UsageError for a missing one."""
    for path, value in answers.items():
        setattr(_owner(path), path.replace(":", ".").rpartition(".")[2], value)


def _owner(path: str) -> Any:
    """The object that has the last attribute of "module:attribute.attribute". Raises UsageError if that is missing."""
    module, _, attributes = path.partition(":")
    holder, _, name = attributes.rpartition(".")
    owner = find(f"{module}:{holder}")
    if not hasattr(owner, name):
        raise UsageError(
            f"PyTorch {torch.__version__} lacks {path.replace(':', '.')}, which a build without a GPU replaces",
            "install a tested version of PyTorch (tcdeploy doctor), or build on a machine with the GPU",
        )
    return owner


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *arguments, **named: value


class _Stream:
    """Stands in for torch.cuda.Stream."""

    cuda_stream, device_index = 0, DEVICE_INDEX
    device = torch.device("cuda", DEVICE_INDEX)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    synchronize = record_event = wait_event = wait_stream


def _properties(gpu: GPUDescription) -> types.SimpleNamespace:
    """As torch.cuda.get_device_properties returns them."""
    major, minor = gpu.capability
    return types.SimpleNamespace(
        name=gpu.name, major=major, minor=minor, multi_processor_count=gpu.multiprocessors,
        total_memory=gpu.memory_bytes, warp_size=WARP_SIZE, regs_per_multiprocessor=gpu.registers_per_multiprocessor,
        max_threads_per_multi_processor=gpu.threads_per_multiprocessor, max_threads_per_block=MAX_THREADS_PER_BLOCK,
        shared_memory_per_block=STATIC_SHARED_BYTES, shared_memory_per_block_optin=gpu.shared_bytes_per_block,
        shared_memory_per_multiprocessor=gpu.shared_bytes_per_multiprocessor, L2_cache_size=gpu.l2_bytes,
        clock_rate=1000 * gpu.clock_mhz, memory_clock_rate=1000 * gpu.memory_clock_mhz,
        memory_bus_width=gpu.memory_bus_bits, is_integrated=0, is_multi_gpu_board=0, gcnArchName="",
    )  # fmt: skip


def _early_answers(gpu: GPUDescription) -> dict[str, Any]:
    """Of torch.cuda, of which Dynamo keeps copies when it is imported."""
    values = {
        "is_available": True, "device_count": 1, "current_device": DEVICE_INDEX, "_get_device_index": DEVICE_INDEX,
        "get_device_properties": _properties(gpu), "get_device_capability": gpu.capability,
        "get_device_name": gpu.name, "_lazy_init": None, "_is_compiled": True, "is_initialized": True,
        "set_device": None, "synchronize": None, "empty_cache": None, "_exchange_device": DEVICE_INDEX,
        "_maybe_exchange_device": DEVICE_INDEX, "current_stream": _Stream(), "set_rng_state": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8), "memory_reserved": 0, "memory_allocated": 0,
        "is_current_stream_capturing": False, "mem_get_info": (gpu.memory_bytes, gpu.memory_bytes),
        "is_bf16_supported": True,
    }  # fmt: skip
    answers: dict[str, Any] = {f"torch.cuda:{name}": _answer(value) for name, value in values.items()}
    return answers | {"torch.cuda:Stream": _Stream, "torch.cuda:stream": contextlib.nullcontext}


def _torch_answers(gpu: GPUDescription) -> dict[str, Any]:
    fake_tensor = "torch._subclasses.fake_tensor"
    return {
        "torch:_C._cuda_getCurrentRawStream": _answer(0),
        f"{fake_tensor}:init_gpu_context": _answer(None),
        f"{fake_tensor}:FakeTensorMode.avoid_device_init": True,  # torch's choice if it sees no GPU
        "torch._dynamo.utils:preserve_rng_state": contextlib.nullcontext,
        # The code of jit programs allocates and views through C++ functions that do not support fake tensors.
        "torch:_C._dynamo.guards._empty_strided_cuda": _empty_strided,
        "torch:_C._dynamo.guards._reinterpret_tensor": _reinterpret,
        "torch:tensor": _without_pinning(torch.tensor),
        "torch._utils_internal:max_clock_rate": _answer(gpu.clock_mhz),  # otherwise of nvidia-smi
    }


def _compiler_answers(libraries: Path) -> dict[str, Any]:
    runtime, padding = "torch._inductor.runtime", "torch._inductor.fx_passes.pad_mm"
    autotuner, launcher = f"{runtime}.triton_heuristics:CachingAutotuner", f"{runtime}.static_triton_launcher"
    stored_padding = find(f"{padding}:get_cached_should_pad") or _answer(False)

    def choose_padding(key: str) -> bool:
        """Whether to pad a product. torch times both forms; here products are not padded."""
        is_padded = bool(stored_padding(key))
        if not is_padded:
            choices[f"product {key[:60]}: not padded"] = None
        return is_padded

    fast_launcher = f"{autotuner}._build_fast_launcher"  # of torch 2.13, which calls the driver without Python
    return {
        **({fast_launcher: _answer(None)} if find(fast_launcher) else {}),
        f"{runtime}.triton_helpers:set_driver_to_gpu": _answer(None),
        f"{autotuner}.benchmark_all_configs": _take_first_config,
        f"{autotuner}.coordinate_descent_tuning": lambda self, launcher, *arguments, **named: launcher,
        f"{padding}:get_cached_should_pad": choose_padding,
        f"{launcher}:StaticallyLaunchedTritonKernel.load_kernel": _load_static_kernel,
        f"{launcher}:StaticallyLaunchedTritonKernel.run": _answer(None),
        "triton.runtime.build:_load_module_from_path": _answer(_Library()),
        "triton.backends.nvidia.driver:library_dirs": lambda: [
            find("triton.backends.nvidia.driver:libdevice_dir"), str(libraries),
        ],
    }  # fmt: skip


def _take_first_config(autotuner: Any, *arguments: Any, **named: Any) -> dict[Any, int]:
    """In place of milliseconds by launcher: Inductor's order."""
    autotuner.precompile_time_taken_ns = UNTIMED_NS  # so that the stored result has a negative time
    choices[f"kernel {autotuner.fn.__name__}: the first of {len(autotuner.launchers)} configs"] = None
    return {launcher: index for index, launcher in enumerate(autotuner.launchers)}


def _load_static_kernel(kernel: Any, device: int) -> None:
    if getattr(kernel, "function", None) is None:
        kernel.n_regs, kernel.n_spills = kernel_resources(Path(kernel.cubin_path).read_bytes())
        kernel.function, kernel.cubin_path, kernel.cubin_raw = HANDLE, None, None


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=_Stream.device)


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _without_pinning(make_tensor: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *values, pin_memory=False, **options: make_tensor(*values, **options)


class _Library:
    """Stands in for a loaded C library of Triton."""

    def __getattr__(self, name: str) -> Any:
        return _answer(None)


class _DriverQueries:
    """`driver.utils` of Triton."""

    def __init__(self, gpu: GPUDescription) -> None:
        self._gpu = gpu

    def get_device_properties(self, device: int) -> dict[str, int]:
        gpu = self._gpu
        return {
            "max_shared_mem": gpu.shared_bytes_per_block, "multiprocessor_count": gpu.multiprocessors,
            "max_num_regs": gpu.registers_per_multiprocessor, "warpSize": WARP_SIZE,
            "sm_clock_rate": 1000 * gpu.clock_mhz, "mem_clock_rate": 1000 * gpu.memory_clock_mhz,
            "mem_bus_width": gpu.memory_bus_bits,
        }  # fmt: skip

    def load_binary(self, name: str, cubin: bytes, shared_bytes: int, device: int) -> tuple[int, ...]:
        """(module, function, registers, spills, most threads)."""
        return HANDLE, HANDLE, *kernel_resources(cubin), MAX_THREADS_PER_BLOCK


class _Driver:
    """`triton.runtime.driver.active`."""

    def __init__(self, gpu: GPUDescription) -> None:
        self.utils, self._gpu = _DriverQueries(gpu), gpu

    def get_current_target(self) -> Any:
        major, minor = self._gpu.capability
        return find("triton.backends.compiler:GPUTarget")("cuda", 10 * major + minor, WARP_SIZE)

    def get_current_device(self) -> int:
        return DEVICE_INDEX

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int = DEVICE_INDEX) -> int:
        return 0

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_active_torch_device(self) -> torch.device:
        return _Stream.device

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """A launcher that does nothing, after building the C library with which Triton 3.6 launches this signature."""
        nvidia = importlib.import_module("triton.backends.nvidia.driver")
        if not hasattr(nvidia.CudaUtils, "instance"):
            nvidia.CudaUtils()  # builds the library of driver queries
        if "compile_module_from_src" in nvidia.CudaLauncher.__init__.__code__.co_names:  # not in Triton 3.7
            nvidia.CudaLauncher(source, metadata)
        launch: Callable[..., None] = _answer(None)
        return launch
