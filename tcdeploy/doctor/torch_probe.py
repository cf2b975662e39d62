"""Describes torch, the packages that depend on it, and the GPUs. A process of its own imports them.

A broken package or driver can end a process or make it hang, and an import of torch takes seconds. The process writes
one JSON line per section to its stdout as soon as it has it, so what it found before it failed is known. It writes no
bytecode, because modules without bytecode are counted. Does not import torch, except in the process.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tcdeploy.planning.environment import Environment, detect_environment, parse_environment

PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])
COMMAND = (
    f"import sys; sys.path.insert(0, {PACKAGE_PARENT!r}); "
    "from tcdeploy.doctor.torch_probe import write_sections; write_sections()"
)
PROBE_SECONDS = 120.0  # without bytecode, the imports take 20 s on two cores
KILL_SECONDS = 5.0
NVIDIA_SMI_SECONDS = 10.0
GPU_QUERY = ("uuid", "name", "driver_version", "memory.total", "memory.used")
PROCESS_QUERY = ("gpu_uuid", "pid", "used_memory")


@dataclass(frozen=True)
class TorchProbe:
    sections: Mapping[str, Any]  # by name, what each function of SECTIONS returned
    errors: Mapping[str, str]  # by the name of a section, the exception that it raised
    failure: str = ""  # why the process did not finish; "" if it did
    failed_at: str = ""  # the section that did not finish; "" if the process could not be started

    def fails(self, section: str) -> bool:
        """Whether this section failed, and not an earlier one that ended the process."""
        return section in self.errors or self.failed_at == section

    def reason(self, section: str) -> str:
        """Why a section is missing."""
        return self.errors.get(section) or self.failure or "the process did not report it"

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """Those that torch uses."""
        return (self.sections.get("gpus") or {}).get("gpus", [])

    @property
    def environment(self) -> Environment | None:
        """This machine, as a plan sees it."""
        values = self.sections.get("environment")
        return None if values is None else parse_environment(values)


@functools.cache
def run_torch_probe(seconds: float = PROBE_SECONDS, command: str = COMMAND) -> TorchProbe:
    """Run the process, and end it and its children after `seconds`. Runs it once per process of this package."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-B", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return TorchProbe({}, {}, f"Python cannot be started: {error.strerror}")
    atexit.register(_kill, process)  # if this process is interrupted
    failure = ""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        failure = f"did not finish within {seconds:.0f} s"
        _kill(process)
        try:
            out, err = process.communicate(timeout=KILL_SECONDS)
        except subprocess.TimeoutExpired as error:  # a killed process that waits for a driver may not end
            out, err = error.stdout or b"", b""
    documents = list(_parse_lines(out.decode(errors="replace")))
    sections = {item["section"]: item["value"] for item in documents if "value" in item}
    errors = {item["section"]: item["error"] for item in documents if "error" in item}
    if process.returncode and not failure:
        failure = _describe_exit(process.returncode, err.decode(errors="replace"))
    if not failure:
        return TorchProbe(sections, errors)
    failed_at = next((name for name in SECTIONS if name not in sections and name not in errors), "")
    return TorchProbe(sections, errors, f"the process that imports torch {failure} (at: {failed_at})", failed_at)


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _describe_exit(returncode: int, err: str) -> str:
    if returncode < 0:
        return f"was ended by signal {signal.Signals(-returncode).name}"
    last_line = err.strip().splitlines()[-1:]
    return ": ".join([f"exited with status {returncode}", *last_line])


def _parse_lines(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            if isinstance(document := json.loads(line), dict) and document.get("section") in SECTIONS:
                yield document


# In the process


def write_sections() -> None:
    """Write each section to stdout. Whatever libraries write to stdout goes to stderr."""
    from tcdeploy.host.stages import ImportTimer

    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    timer = ImportTimer()
    for name, describe in SECTIONS.items():
        try:
            with timer.measure():
                document = {"section": name, "value": describe(timer)}
        except Exception as error:  # a broken package may raise any exception when it is imported
            document = {"section": name, "error": f"{type(error).__name__}: {_first_line(error)}"[:400]}
        out.write(json.dumps(document) + "\n")
        out.flush()
    out.close()
    os._exit(0)  # libraries may crash or hang at exit


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _describe_driver(timer: Any) -> dict[str, Any]:
    """Before torch creates a CUDA context, which would be counted as used memory.

    A container does not see the processes of other containers, or sees them with other numbers.
    """
    gpus: list[dict[str, str]] = []
    processes: list[dict[str, str]] = []
    error = ""
    try:
        gpus, error = _query_driver("gpu", GPU_QUERY)
        processes, _ = _query_driver("compute-apps", PROCESS_QUERY)
    except subprocess.TimeoutExpired:
        if not gpus:
            error = f"nvidia-smi did not answer within {NVIDIA_SMI_SECONDS:.0f} s"
            return {"cuda": None, "gpus": [], "error": error, "processes": []}
    except FileNotFoundError:  # not installed
        pass
    return {"cuda": _driver_cuda_version(), "gpus": gpus, "error": error, "processes": processes}


def _query_driver(subject: str, names: tuple[str, ...]) -> tuple[list[dict[str, str]], str]:
    """The rows that nvidia-smi prints, and its error. Raises OSError and TimeoutExpired."""
    command = ["nvidia-smi", f"--query-{subject}={','.join(names)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS)
    if done.returncode:
        return [], next(iter((done.stdout + done.stderr).strip().splitlines()), f"status {done.returncode}")
    rows = [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines()]
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)], ""


def _driver_cuda_version() -> list[int] | None:
    """(major, minor) of the newest CUDA that the driver supports; None without a driver."""
    import ctypes

    from tcdeploy.torch_compat.triton.cuda_driver import LIBRARY

    try:
        cuda, version = ctypes.CDLL(LIBRARY), ctypes.c_int()
        if cuda.cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return [version.value // 1000, version.value % 1000 // 10]


def _describe_torch(timer: Any) -> dict[str, Any]:
    import torch

    return {"version": torch.__version__, "cuda": torch.version.cuda}


def _describe_gpus(timer: Any) -> dict[str, Any]:
    """The GPUs that torch uses, or why it uses none."""
    import torch

    if not torch.cuda.is_available():
        problem = ""
        if torch.version.cuda is not None:
            try:
                torch.cuda.init()
            except (RuntimeError, AssertionError) as error:
                problem = _first_line(error)
        return {"gpus": [], "problem": problem, "architectures": []}
    gpus: list[dict[str, Any]] = [
        {
            "name": gpu.name, "capability": [gpu.major, gpu.minor], "total": gpu.total_memory,
            "uuid": f"GPU-{getattr(gpu, 'uuid', '')}",
        }
        for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]  # fmt: skip
    gpus[0]["free"] = torch.cuda.mem_get_info(0)[0]  # creates a context, so only on the GPU that a deployment uses
    return {"gpus": gpus, "problem": "", "architectures": torch.cuda.get_arch_list()}


def _describe_internals(timer: Any) -> list[tuple[str, str]]:
    """(name, consequence) of the private names that installed packages lack."""
    from tcdeploy.torch_compat.registry import missing_internals

    return list(missing_internals())


def _describe_cache_keys(timer: Any) -> dict[str, dict[str, str]]:
    """The inputs of torch's cache key that are neither in the environment nor in the plan."""
    from tcdeploy.programs.passes.post_grad import op_source_digests
    from tcdeploy.torch_compat.inductor.settings import torch_settings

    return {"sources": op_source_digests(), "settings": torch_settings()}


SECTIONS: dict[str, Callable[[Any], Any]] = {
    "driver": _describe_driver,
    "torch": _describe_torch,
    "gpus": _describe_gpus,
    "transformers": lambda timer: importlib.import_module("transformers").__version__,
    "internals": _describe_internals,
    "environment": lambda timer: dataclasses.asdict(detect_environment()),
    "cache keys": _describe_cache_keys,
    "uncompiled": lambda timer: dict(timer.without_bytecode),
}
