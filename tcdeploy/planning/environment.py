"""Describes the machine: its versions and hardware. The plan is made from it, and a cache's manifest stores it.

`Environment` is plain data without torch, so a test on a laptop can plan for an H100, and `diff_environments` can
explain why a cache from another machine does not fit. `detect_environment` fills it in; only it imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sysconfig
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tcdeploy.host.resources import host_memory_bytes
from tcdeploy.planning.backends import BACKENDS, Backend


@dataclass(frozen=True, kw_only=True)
class GPU:
    """One GPU as torch describes it; capability is (major, minor)."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    multiprocessors: int


def is_same_model(gpu: GPU, other: GPU) -> bool:
    """Whether both are the same GPU model. The memory is not compared: what torch reports differs between drivers."""
    return replace(gpu, memory_bytes=other.memory_bytes) == other


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Versions and hardware of one machine."""

    python: str
    torch: str
    transformers: str
    triton: str
    cuda: str
    driver: str
    gpus: tuple[GPU, ...]  # all that torch sees; deployments use the first
    cpu: str  # torch's instruction set, which ATEN_CPU_CAPABILITY limits, and the extensions of AVX-512 and SVE
    cpu_threads: int
    host_memory_bytes: int
    compiler: str  # first line of `g++ --version`, or of the compiler that CXX names; empty without it
    flash_packages: tuple[tuple[str, str], ...]  # (backend, version) of each installed package
    install_paths: str = ""  # of Python's headers and of torch; they enter the cache keys of CPU programs
    inductor_cache_dir: str = ""  # TORCHINDUCTOR_CACHE_DIR, if the user set it
    user_cache_dir: str = ""  # $XDG_CACHE_HOME, or ~/.cache
    missing_internals: tuple[tuple[str, str], ...] = ()  # (name, consequence) of what torch_compat does not find
    torch_settings: str = ""  # digest of what torch_compat/inductor/settings.py reads; empty if it was not read

    @property
    def gpu(self) -> str:
        """Name of the first GPU; empty without one."""
        return self.gpus[0].name if self.gpus else ""

    @property
    def gpu_capability(self) -> tuple[int, int]:
        return self.gpus[0].capability if self.gpus else (0, 0)

    @property
    def gpu_memory_bytes(self) -> int:
        return self.gpus[0].memory_bytes if self.gpus else 0

    @property
    def gpu_multiprocessors(self) -> int:
        return self.gpus[0].multiprocessors if self.gpus else 0

    def describe_gpus(self) -> str:
        """`8 x NVIDIA H100 80GB HBM3`; GPUs that differ in any way are listed with memory, capability and SMs."""
        if len(set(self.gpus)) > 1:
            return ", ".join(f"GPU {index}: {_describe_gpu(gpu)}" for index, gpu in enumerate(self.gpus))
        return f"{len(self.gpus)} x {self.gpu}" if len(self.gpus) > 1 else self.gpu

    def cache_factors(self) -> dict[str, object]:
        """The fields that compiled programs depend on, by name. Python counts as major.minor, and only the first GPU.

        With a GPU the C++ compiler and the CPU are left out: a serving image needs no compiler, and a machine with more
        cores can start from the same cache.
        """
        ignored = IGNORED_FACTORS | (CPU_ONLY_FACTORS if self.gpus else set())
        factors: dict[str, object] = {}
        for name, value in asdict(self).items():
            if name == "gpus":
                factors |= {factor: getattr(self, factor) for factor in GPU_FACTORS}
            elif name not in ignored:
                factors[name] = value
        return {**factors, "python": ".".join(self.python.split(".")[:2])}

    @property
    def cache_key(self) -> str:
        """16 hex digits. Equal for two environments in which the same graph compiles to the same program.

        It is part of the plan's key and of torch's key of each program. torch's own key lacks some of the factors, such
        as the instruction set: a program for another one would be loaded, and would damage memory.
        """
        factors = {**self.cache_factors(), "torch_settings": self.torch_settings}
        return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:16]


STAGING_PREFIX = ".start-"  # the prefix of staging folders in a cache folder (cache/staging/folder.py)
GPU_FACTORS = ("gpu", "gpu_capability", "gpu_multiprocessors")
CPU_ONLY_FACTORS = {"compiler", "install_paths", "cpu", "cpu_threads"}
AOT_PACKAGES = "ahead-of-time packages"  # of torch, as torch_compat/inductor/aot_package.py names it
DYNAMIC_SIZES = "dynamic sizes"  # the private interface of torch, as torch_compat/dynamo/mark_dynamic.py names it
# `torch_settings` is a factor too, but manifests hold the settings one by one.
IGNORED_FACTORS = {
    "inductor_cache_dir", "user_cache_dir", "driver", "host_memory_bytes", "missing_internals", "torch_settings",
}  # fmt: skip
# Flags in /proc/cpuinfo for which Inductor generates different code. torch's name of the instruction set omits them.
CPU_EXTENSIONS = ("avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16", "sve", "sve2", "bf16")


@dataclass(frozen=True)
class Difference:
    name: str
    here: str
    there: str


def diff_environments(here: Environment, there: Environment) -> list[Difference]:
    """The cache factors that both environments have and in which they differ, in field order."""
    factors, other_factors = here.cache_factors(), there.cache_factors()
    shared = factors.keys() & other_factors.keys()
    return [difference for difference in diff_mappings(factors, other_factors) if difference.name in shared]


def diff_mappings(here: Mapping[str, object], there: Mapping[str, object], prefix: str = "") -> list[Difference]:
    """The keys under which two mappings differ; a missing value is shown as "-"."""
    return [
        Difference(f"{prefix}{name}", str(here.get(name, "-")), str(there.get(name, "-")))
        for name in {**here, **there}
        if here.get(name) != there.get(name)
    ]


def parse_environment(document: Mapping[str, Any]) -> Environment:
    """The Environment that a manifest holds as JSON. Raises TypeError or KeyError if it is not one."""
    values = lists_to_tuples(dict(document))
    return Environment(**{**values, "gpus": tuple(GPU(**gpu) for gpu in values["gpus"])})


def lists_to_tuples(value: Any) -> Any:
    """JSON has no tuples: turns lists back into them, and those inside mappings too."""
    if isinstance(value, dict):
        return {name: lists_to_tuples(item) for name, item in value.items()}
    return tuple(lists_to_tuples(item) for item in value) if isinstance(value, list | tuple) else value


def _describe_gpu(gpu: GPU) -> str:
    major, minor = gpu.capability
    gib = gpu.memory_bytes / 2**30
    return f"{gpu.name} ({gib:.0f} GiB, compute capability {major}.{minor}, {gpu.multiprocessors} SMs)"


def detect_environment(device: str | None = None) -> Environment:
    """Describes this machine. Imports torch, and initialises CUDA if there is a GPU.

    With the recipe's `device` "cpu", it has no GPUs: programs then depend on the CPU and the compiler.
    """
    import torch

    gpus = () if device == "cpu" else _detect_gpus()
    flags = _cpu_info("flags", "Features").split()
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=installed_version("transformers"),
        triton=installed_version("triton"),
        cuda=torch.version.cuda or "" if gpus else "",
        driver=_driver_version() if gpus else "",
        gpus=gpus,
        cpu=describe_cpu(torch.backends.cpu.get_cpu_capability(), platform.machine(), flags),
        cpu_threads=torch.get_num_threads(),
        host_memory_bytes=host_memory_bytes(),
        compiler=_first_output_line(os.environ.get("CXX", "g++"), "--version"),
        flash_packages=installed_flash_packages(),
        install_paths=f"{sysconfig.get_path('include')} {os.path.dirname(torch.__file__)}",
        inductor_cache_dir=requested_inductor_cache_dir(),
        user_cache_dir=user_cache_dir(),
    )


def user_cache_dir() -> str:
    """$XDG_CACHE_HOME, or ~/.cache."""
    return os.environ.get("XDG_CACHE_HOME", "") or os.path.expanduser("~/.cache")


def find_cache_dir(requested: str | None, environment: Environment | None = None) -> tuple[str, str]:
    """The cache folder, and the reason for it: in the recipe, or in the environment, that of this process by default.

    Needs no torch.
    """
    if requested:
        return os.path.expanduser(requested), "requested"
    folder = environment.inductor_cache_dir if environment else requested_inductor_cache_dir()
    if folder:
        return folder, "TORCHINDUCTOR_CACHE_DIR was already set"
    parent = environment.user_cache_dir if environment else user_cache_dir()
    return f"{parent}/tcdeploy", "default; use a separate folder for CI and images"


def requested_inductor_cache_dir() -> str:
    """The cache folder that the user has set in TORCHINDUCTOR_CACHE_DIR; empty if the user has set none.

    torch 2.13 sets the variable to torchinductor_USER in the temporary folder, which another user may own: that is
    ignored. A start sets it to a staging folder (cache/staging/folder.py); then the folder around that is returned.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")
    parent, name = os.path.split(os.path.abspath(folder))
    if name.startswith(STAGING_PREFIX):
        return parent
    is_torch_default = name.startswith("torchinductor_") and parent in (tempfile.gettempdir(), "/tmp", "/var/tmp")
    return "" if is_torch_default else folder


def _detect_gpus() -> tuple[GPU, ...]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(
        GPU(
            name=gpu.name,
            capability=(gpu.major, gpu.minor),
            memory_bytes=gpu.total_memory,
            multiprocessors=gpu.multi_processor_count,
        )
        for gpu in map(torch.cuda.get_device_properties, range(count))
    )


def installed_versions() -> dict[str, object]:
    """The cache factors that are available without importing torch; the first GPU as nvidia-smi names it, if any.

    Python's version is complete. A package that is not installed has the version "".
    """
    gpu = _first_output_line("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return {
        "python": platform.python_version(),
        **{name: installed_version(name) for name in ("torch", "transformers", "triton")},
        "flash_packages": installed_flash_packages(),
        **({"gpu": gpu} if gpu else {}),
    }


def installed_flash_packages() -> tuple[tuple[str, str], ...]:
    """(backend, version) of each installed flash-attn package, by backend name.

    They are not imported: importing FlashAttention-4 takes 5 to 10 s on an H100 machine.
    """
    return tuple(
        (backend.name, installed_version(backend.distribution) or "unknown version")
        for backend in sorted(BACKENDS.values(), key=lambda backend: backend.name)
        if backend.module and _has_module(backend)
    )


def _has_module(backend: Backend) -> bool:
    """Whether `backend.module` exists and belongs to the backend's distribution.

    FlashAttention-4 ships a `flash_attn` folder without an __init__.py, a namespace package for Python, which does not
    mean that FlashAttention-2 (`flash_attn`) is installed. flash-attn 2.8 ships an early `flash_attn.cute` with another
    interface. A submodule therefore counts only if the distribution is installed.
    """
    parent, _, child = backend.module.rpartition(".")
    spec = importlib.util.find_spec(parent or child)
    if not parent:
        return spec is not None and spec.origin is not None
    folders = list(spec.submodule_search_locations or ()) if spec and installed_version(backend.distribution) else []
    return importlib.machinery.PathFinder.find_spec(backend.module, folders) is not None


def installed_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def cpu_name() -> str:
    """The CPU's model as Linux names it, or what Python knows of it. No cache factor: `Environment.cpu` is."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def describe_cpu(capability: str, machine: str, flags: Collection[str]) -> str:
    """torch's name of the instruction set, and the extensions that Inductor may use with it.

    `machine`, `flags`: of the CPU, as Linux names them. On x86, AVX2 and DEFAULT have no extensions.
    """
    if machine == "x86_64" and capability != "AVX512":
        return capability
    return " ".join([capability, *(name for name in CPU_EXTENSIONS if name in flags)])


def _cpu_info(*names: str) -> str:
    """The first value of these names in /proc/cpuinfo, that of the first core; "" outside of Linux."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return ""


def _driver_version() -> str:
    with contextlib.suppress(OSError):  # no such file outside of Linux; nvidia-smi takes 20 ms
        return Path("/sys/module/nvidia/version").read_text().strip()
    return _first_output_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _first_output_line(*command: str) -> str:
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return out.splitlines()[0].strip() if out.strip() else ""
