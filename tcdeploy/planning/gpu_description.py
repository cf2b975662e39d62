"""Descriptions of GPUs. With them, a model can be planned for a GPU that this machine does not have.

A description is a JSON file. The files in `gpus/` describe common GPUs, and `tcdeploy doctor --describe-gpu` prints a
description of the machine's first GPU. Name, capability and number of multiprocessors are factors of the cache key, so
a plan for "h100-pcie" does not fit an H100 SXM. The memory that torch reports differs by some hundred MiB between
drivers; the files in `gpus/` state a low value. Does not import torch, except in `describe_first_gpu`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tcdeploy.errors import UsageError
from tcdeploy.host.typed_json import from_json
from tcdeploy.planning.environment import GPU, Environment

FOLDER = Path(__file__).parent / "gpus"
# The compute capabilities from 8.0 on that CUDA 13 supports, and the first CUDA version that supports each.
MIN_CUDA = {
    (8, 0): (11, 0), (8, 6): (11, 1), (8, 7): (11, 4), (8, 8): (13, 0), (8, 9): (11, 8), (9, 0): (11, 8),
    (10, 0): (12, 8), (10, 3): (12, 9), (11, 0): (13, 0), (12, 0): (12, 8), (12, 1): (12, 9),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GPUDescription:
    """A GPU as torch describes it. Memory in bytes, clocks in MHz."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    memory_bytes: int
    l2_bytes: int
    shared_bytes_per_block: int  # the most that a kernel may request
    shared_bytes_per_multiprocessor: int
    registers_per_multiprocessor: int
    threads_per_multiprocessor: int
    clock_mhz: int
    memory_clock_mhz: int
    memory_bus_bits: int
    cuda: str  # the assumed CUDA version of torch, if the planning machine has torch for CPUs
    driver: str = ""  # version; "" if unknown

    @property
    def gpu(self) -> GPU:
        """The GPU as an Environment describes it."""
        return GPU(
            name=self.name,
            capability=self.capability,
            memory_bytes=self.memory_bytes,
            multiprocessors=self.multiprocessors,
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)


def gpu_names() -> list[str]:
    """The names of the GPUs that `gpus/` describes."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_gpu_description(name_or_file: str) -> GPUDescription:
    """The description of the GPU with a name of `gpu_names()`, or the one in a JSON file.

    A name that ends with .json or contains a path separator is a file. Raises UsageError.
    """
    is_file = name_or_file.endswith(".json") or os.sep in name_or_file
    path = Path(name_or_file) if is_file else FOLDER / f"{name_or_file}.json"
    command = "tcdeploy doctor --describe-gpu > GPU.json"
    hint = f"known GPUs are {', '.join(gpu_names())}; for another one, run this on its machine: {command}"
    if not is_file and name_or_file not in gpu_names():
        raise UsageError(f"no GPU is called {name_or_file!r}", hint)
    if not os.path.exists(path):  # unlike Path.exists, false for names that are too long
        raise UsageError(f"the file {path} does not exist", hint)
    try:
        description = from_json(GPUDescription, json.loads(path.read_text()), "the description")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} does not describe a GPU: {error}", hint) from error
    if problem := _problem(description):
        raise UsageError(f"{path} does not describe a GPU: {problem}", hint)
    return description


def with_target_gpu(environment: Environment, target: GPUDescription, torch_cuda: str) -> Environment:
    """The environment of a machine with the same packages, and with `target` as its only GPU.

    torch_cuda: the CUDA version that torch is built for; "" for CPUs. Raises UsageError if it is too old for the GPU.
    """
    needed = MIN_CUDA[target.capability]
    if torch_cuda and _version(torch_cuda) < needed:
        message = f"torch is built for CUDA {torch_cuda}, and {target.name} requires CUDA {needed[0]}.{needed[1]}"
        raise UsageError(message, "install a PyTorch build for a newer CUDA version: https://pytorch.org")
    cuda = torch_cuda or target.cuda
    return dataclasses.replace(environment, gpus=(target.gpu,), cuda=cuda, driver=target.driver)


def describe_first_gpu(environment: Environment) -> GPUDescription:
    """Describe the GPU that a deployment on this machine would use.

    `environment`: that of this machine. Raises UsageError if torch sees no GPU.
    """
    import torch

    if not environment.gpus:
        raise UsageError("torch sees no GPU", "tcdeploy doctor checks the GPU and its driver")
    properties: Any = torch.cuda.get_device_properties(0)
    return GPUDescription(
        **dataclasses.asdict(environment.gpus[0]),
        l2_bytes=properties.L2_cache_size,
        shared_bytes_per_block=properties.shared_memory_per_block_optin,
        shared_bytes_per_multiprocessor=properties.shared_memory_per_multiprocessor,
        registers_per_multiprocessor=properties.regs_per_multiprocessor,
        threads_per_multiprocessor=properties.max_threads_per_multi_processor,
        clock_mhz=properties.clock_rate // 1000,
        memory_clock_mhz=properties.memory_clock_rate // 1000,
        memory_bus_bits=properties.memory_bus_width,
        cuda=environment.cuda,
        driver=environment.driver,
    )


def _problem(description: GPUDescription) -> str:
    """Why no GPU that tcdeploy supports can have this description; "" if one can."""
    if description.capability not in MIN_CUDA:
        major, minor = description.capability
        return f"compute capability {major}.{minor} does not exist or is below 8.0"
    if not description.name.strip() or not description.name.isprintable():
        return f"its name is {description.name!r}"
    needed = MIN_CUDA[description.capability]
    if not re.fullmatch(r"[0-9]{1,4}\.[0-9]{1,4}", description.cuda) or _version(description.cuda) < needed:
        return f"cuda is {description.cuda!r}, and the GPU requires {needed[0]}.{needed[1]} or newer"
    numbers = {name: value for name, value in dataclasses.asdict(description).items() if isinstance(value, int)}
    return next((f"{name} is {value}" for name, value in numbers.items() if value <= 0), "")


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])
