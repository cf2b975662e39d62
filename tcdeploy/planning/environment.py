"""What this machine is: the record that the Plan is made from, and that a cache is compared with.

`Environment` is plain data without torch, so that a laptop can plan for an H100 in a test, and so that `diff_environments` can
explain a cache that was made elsewhere. `detect_environment` fills it and is the one place that imports torch, late.

flash-attn packages are found without importing them: FlashAttention-4 takes 5 to 10 s to import on an H100 machine.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

FLASH_PACKAGES = {  # backend -> (module that holds its interface, distribution that gives its version)
    "flash-attn-2": ("flash_attn", "flash-attn"),
    "flash-attn-3": ("flash_attn_interface", "flash-attn-3"),
    "flash-attn-4": ("flash_attn.cute", "flash-attn-4"),
}


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Versions and hardware. Memory is in bytes; `gpu` is empty on a machine without one."""

    python: str
    torch: str
    transformers: str
    triton: str
    cuda: str
    driver: str
    gpu: str
    gpu_capability: tuple[int, int]
    gpu_memory_bytes: int
    gpu_multiprocessors: int
    cpu: str
    cpu_threads: int
    host_memory_bytes: int
    compiler: str
    flash_packages: tuple[tuple[str, str], ...]  # (backend, version) of what is installed
    install_paths: str = ""  # of Python's headers and of torch: they stand in the names of a CPU's programs
    inductor_cache_dir: str = ""  # an already set TORCHINDUCTOR_CACHE_DIR
    user_cache_dir: str = ""
    missing_internals: tuple[tuple[str, str], ...] = ()  # (name, consequence), of torch_compat's registry

    def cache_factors(self) -> dict[str, object]:
        """What compiled programs depend on: all but the places of folders, the driver and the amounts of memory.

        With a GPU neither the C++ compiler nor the CPU is in them: an image that serves needs no compiler, and a
        machine with more cores starts from the same cache. Of Python's version the first two parts count.
        """
        ignored = IGNORED_FACTORS | (CPU_ONLY_FACTORS if self.gpu else set())
        factors = {key: value for key, value in asdict(self).items() if key not in ignored}
        return {**factors, "python": ".".join(self.python.split(".")[:2])}


CPU_ONLY_FACTORS = {"compiler", "install_paths", "cpu", "cpu_threads"}
DYNAMIC_SIZES, TORCH_FLASH = "dynamic sizes", "torch-flash attention"  # missing internals that the Plan decides by
IGNORED_FACTORS = {
    "inductor_cache_dir", "user_cache_dir", "driver", "gpu_memory_bytes", "host_memory_bytes", "missing_internals",
}  # fmt: skip


@dataclass(frozen=True)
class Difference:
    name: str
    here: str
    there: str


def diff_environments(here: Environment, there: Environment) -> list[Difference]:
    """Every factor of both environments' programs in which they differ, in the order of the fields."""
    mine, theirs = here.cache_factors(), there.cache_factors()
    shared = [name for name in mine if name in theirs]
    return diff_mappings({name: mine[name] for name in shared}, {name: theirs[name] for name in shared})


def diff_mappings(here: Mapping[str, object], there: Mapping[str, object], prefix: str = "") -> list[Difference]:
    """Every name under which two records hold something else; a "-" stands for nothing."""
    return [
        Difference(f"{prefix}{name}", str(here.get(name, "-")), str(there.get(name, "-")))
        for name in {**here, **there}
        if here.get(name) != there.get(name)
    ]


def detect_environment() -> Environment:
    """Read this machine. Imports torch and, where there is a GPU, starts CUDA."""
    import torch

    has_gpu = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(0) if has_gpu else None
    return Environment(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=_version("transformers"),
        triton=_version("triton"),
        cuda=torch.version.cuda or "" if has_gpu else "",
        driver=_driver_version() if has_gpu else "",
        gpu=properties.name if properties else "",
        gpu_capability=(properties.major, properties.minor) if properties else (0, 0),
        gpu_memory_bytes=properties.total_memory if properties else 0,
        gpu_multiprocessors=properties.multi_processor_count if properties else 0,
        cpu=torch.backends.cpu.get_cpu_capability(),
        cpu_threads=torch.get_num_threads(),
        host_memory_bytes=_host_memory_bytes(),
        compiler=_first_output_line("g++", "--version"),
        flash_packages=installed_flash_packages(),
        install_paths=f"{sysconfig.get_path('include')} {os.path.dirname(torch.__file__)}",
        inductor_cache_dir=os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""),
        user_cache_dir=os.environ.get("XDG_CACHE_HOME", "") or os.path.expanduser("~/.cache"),
    )


def installed_versions() -> dict[str, object]:
    """Those factors that can be told without importing torch; the GPU by its driver's tool, where there is one."""
    gpu = _first_output_line("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        **{name: _version(name) for name in ("torch", "transformers", "triton")},
        "flash_packages": installed_flash_packages(),
        **({"gpu": gpu} if gpu else {}),
    }


def _host_memory_bytes() -> int:
    """The machine's, or the container's where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def installed_flash_packages() -> tuple[tuple[str, str], ...]:
    found = []
    for backend, (module, distribution) in FLASH_PACKAGES.items():
        if _is_importable(module):
            found.append((backend, _version(distribution) or "unknown version"))
    return tuple(found)


def _is_importable(module: str) -> bool:
    """Whether `module` exists, without running it or its parent.

    FA4 ships a `flash_attn` folder without an __init__.py: to Python that is a namespace, and FA2 it is not.
    """
    parent, _, child = module.rpartition(".")
    spec = importlib.util.find_spec(parent or child)
    if not parent:
        return spec is not None and spec.origin is not None
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return importlib.machinery.PathFinder.find_spec(module, folders) is not None


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver_version() -> str:
    return _first_output_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _first_output_line(*command: str) -> str:
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return out.splitlines()[0].strip() if out.strip() else ""
