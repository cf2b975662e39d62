"""Checks of the GPUs and of their driver."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from tcdeploy.doctor.host import recipe_from_variables
from tcdeploy.doctor.result import Request, Result, blocking, missing, note, ok, unchecked
from tcdeploy.errors import RecipeError
from tcdeploy.planning.memory import gib
from tcdeploy.planning.recipe import Recipe

MEBIBYTE = 1 << 20
MIN_FRACTION = 0.1  # of the memory; a smaller share is not worth a hint
MIN_BFLOAT16_CAPABILITY = 8  # major; older GPUs have no FlashAttention either


def check_gpus(request: Request) -> Result:
    described, driver = request.probe.sections.get("gpus"), request.probe.sections.get("driver") or {}
    if described is None:
        cure = "end the processes that use its memory (nvidia-smi), and check the driver"
        return missing(request, "gpus", "torch cannot use the GPU", cure)
    if described["gpus"]:
        return judge_gpu(described, driver, _memory_fraction(request))
    return judge_missing_gpu(described, driver, request.probe.sections["torch"]["cuda"])


def _memory_fraction(request: Request) -> float:
    """The fraction of GPU memory that a start without flags may use."""
    try:
        return recipe_from_variables(request).memory_fraction
    except RecipeError:  # reported by check_variables
        return Recipe.memory_fraction


def judge_missing_gpu(described: Mapping[str, Any], driver: Mapping[str, Any], torch_cuda: str | None) -> Result:
    """Whether it is wrong that torch has found no GPU. `torch_cuda`: the CUDA version that torch was built for."""
    names = ", ".join(gpu["name"] for gpu in driver.get("gpus", ()))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not names:
        return note("none: models run on the CPU, without CUDA graphs")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return note(f"{names}, hidden by CUDA_VISIBLE_DEVICES={hidden}: models run on the CPU")
    if torch_cuda is None:
        summary = f"this machine has a GPU ({names}), and the installed torch is built for CPUs"
        return blocking(summary, "install the PyTorch build for your CUDA version: https://pytorch.org")
    return blocking(
        f"torch cannot use the GPU ({names}): {described['problem'] or 'it gives no reason'}",
        "compare the driver with torch's CUDA version, and check CUDA_VISIBLE_DEVICES and the container's GPU access",
    )


def judge_gpu(described: Mapping[str, Any], driver: Mapping[str, Any], memory_fraction: float) -> Result:
    """The first GPU, which deployments use."""
    gpu, architectures = described["gpus"][0], described["architectures"]
    major, minor = gpu["capability"]
    used, users = _used_by_others(gpu, driver)
    free = gpu["total"] - used
    more = f"; {len(described['gpus']) - 1} more, which a deployment does not use" if len(described["gpus"]) > 1 else ""
    summary = f"{gpu['name']}, capability {major}.{minor}, {gib(free)} of {gib(gpu['total'])} free{more}"
    if architectures and not supports_capability(architectures, (major, minor)):
        return blocking(
            f"torch has no kernels for {gpu['name']} (capability {major}.{minor}); it has {' '.join(architectures)}",
            "install a PyTorch build that supports this GPU: https://pytorch.org",
        )
    if free < memory_fraction * gpu["total"]:
        fraction = int(20 * free / gpu["total"]) / 20
        return blocking(
            f"other processes{users} use {gib(used)} of the memory of {gpu['name']}: {gib(free)} of "
            f"{gib(gpu['total'])} are free, and a start may use {memory_fraction:.0%}",
            "end these processes" + (f", or pass --memory-fraction {fraction:g}" if fraction >= MIN_FRACTION else ""),
        )
    if major < MIN_BFLOAT16_CAPABILITY:
        return note(f"{summary}; before capability 8.0 bfloat16 is slow, so pass --dtype float16")
    return ok(summary)


def _used_by_others(gpu: Mapping[str, Any], driver: Mapping[str, Any]) -> tuple[int, str]:
    """(bytes of memory that other processes use, " (pids ...)" if they are known).

    As nvidia-smi has reported it before the probe created its own context; else as torch reports it, with that context.
    """
    rows = [row for row in driver.get("gpus", ()) if row["uuid"] == gpu["uuid"]]
    pids = [row["pid"] for row in driver.get("processes", ()) if row["gpu_uuid"] == gpu["uuid"]]
    users = f" ({', '.join(pids)})" if pids else ""
    if rows and rows[0]["memory.used"].isdigit():
        return int(rows[0]["memory.used"]) * MEBIBYTE, users
    return gpu["total"] - gpu["free"], users


def supports_capability(architectures: Iterable[str], capability: tuple[int, int]) -> bool:
    """Whether a build of torch with these architectures has code for a GPU.

    Binary code (sm_80) runs on GPUs of the same major number and a minor number that is not smaller; PTX (compute_80)
    on all newer ones. Code with a letter (sm_90a) runs on GPUs of exactly this capability.
    """
    for architecture in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", architecture)
        if match is None:
            continue
        built_for = (int(match[2]), int(match[3]))
        runs_on_newer = not match[4] and (match[1] == "compute" or built_for[0] == capability[0])
        if built_for == capability or (runs_on_newer and built_for < capability):
            return True
    return False


def check_driver(request: Request) -> Result:
    driver = request.probe.sections.get("driver")
    if driver is None:
        return missing(request, "driver", "the driver does not answer", "reload the driver, or reboot")
    torch = request.probe.sections.get("torch")
    return judge_driver(driver, torch["cuda"] if torch else None, bool(request.probe.gpus))


def judge_driver(driver: Mapping[str, Any], torch_cuda: str | None, is_used: bool = False) -> Result:
    """Compares the CUDA version that the driver supports with the one that torch was built for (None: for CPUs).

    is_used: torch uses a GPU, so the driver works.
    """
    if driver["error"] and is_used:
        return note(f"torch uses the GPU, but nvidia-smi fails: {driver['error']}")
    if driver["error"]:
        cure = "reload or reinstall the NVIDIA driver; after an update of the driver, reboot"
        return blocking(f"nvidia-smi fails: {driver['error']}", cure)
    if driver["cuda"] is None:
        return note("no NVIDIA driver") if not driver["gpus"] else unchecked("libcuda.so.1 cannot be loaded")
    supported = ".".join(map(str, driver["cuda"]))
    versions = {gpu["driver_version"] for gpu in driver["gpus"]}
    summary = f"{', '.join(sorted(versions)) or 'version unknown'}, supports CUDA {supported}"
    if torch_cuda is None:
        return ok(summary)
    needed = tuple(map(int, torch_cuda.split(".")[:2]))
    if tuple(driver["cuda"]) >= needed:
        return ok(f"{summary}; torch is built for CUDA {torch_cuda}")
    if driver["cuda"][0] == needed[0]:
        return note(f"{summary}; torch is built for CUDA {torch_cuda}, which runs on drivers of the same major version")
    cure = f"install a driver that supports CUDA {torch_cuda}, or a PyTorch build for CUDA {supported}"
    return blocking(f"the driver {summary}, and torch is built for CUDA {torch_cuda}", cure)
