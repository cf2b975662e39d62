"""Checks of the host: cores, memory, the C++ compiler, the temporary folder, and the space on the disks."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tcdeploy.cache.folder.layout import TEST_FILE_PREFIX
from tcdeploy.doctor.result import Request, Result, blocking, finding, note, ok, unchecked
from tcdeploy.host.resources import count_cores, host_memory_bytes
from tcdeploy.planning.extras import is_installed
from tcdeploy.planning.memory import gib
from tcdeploy.programs.cxx_runtime import probe_compiler

COMPILER_SECONDS = 10.0
# About what torch, transformers and the compilers that Inductor starts take.
MIN_MEMORY_BYTES = 4 << 30
MIN_CACHE_BYTES = 256 << 20  # precompiled C++ headers take 156 MB, and the programs of a plan a few MB
MIN_TEMPORARY_BYTES = 64 << 20  # libraries of ahead-of-time packages are loaded from there
TEMPORARY_VARIABLES = ("TMPDIR", "TEMP", "TMP")  # as Python's tempfile reads them
C_COMPILERS = ("gcc", "clang", "cc")


def check_host(request: Request) -> Result:
    cores, all_cores, memory = count_cores(), os.cpu_count() or 1, host_memory_bytes()
    limited = f" of {all_cores}" if cores != all_cores else ""
    summary = f"{cores}{limited} CPU cores, {gib(memory)} of memory"
    if memory < MIN_MEMORY_BYTES:
        return note(f"{summary}; a start that compiles takes about {gib(MIN_MEMORY_BYTES)}, and the weights on a CPU")
    if request.busy:
        return note(  # no finding, whose exit code would depend on the moment
            f"{summary}; {request.busy}: compiling takes longer, and timings (explain, bench, --tune-seconds) are not "
            "reliable",
            "run it again when the other processes have ended, or on another machine",
        )
    return ok(summary)


def check_compiler(request: Request) -> Result:
    compiler = os.environ.get("CXX", "g++")  # as Inductor chooses it
    if shutil.which(compiler) is None:
        return _missing_compiler(compiler)
    version = _version_of(compiler)
    try:
        probe = probe_compiler(compiler)
    except OSError as error:
        return unchecked(f"{error.strerror or error}")
    if probe.failure:
        return blocking(
            f"{version} cannot link a library: {probe.failure}", "install g++ again, or set CXX to another compiler"
        )
    if probe.links_runtime_statically:
        return finding(
            f"{version} links libstdc++ statically, so ahead-of-time packages that it builds cannot be loaded",
            "set CXX to a compiler that links it dynamically, for example CXX=/usr/bin/g++, or use --programs jit",
        )
    has_gpu = bool((request.probe.sections.get("gpus") or {}).get("gpus"))
    if has_gpu and not os.environ.get("CC") and not any(map(shutil.which, C_COMPILERS)):
        return blocking("no C compiler is on PATH, and Triton needs one", "install gcc, or set CC")
    return ok(version)


def _missing_compiler(compiler: str) -> Result:
    source = "CXX names it" if "CXX" in os.environ else "it is not on PATH"
    summary = f"the C++ compiler {compiler} is missing ({source})"
    if not is_installed("transformers"):
        return note(f"{summary}: a start from ahead-of-time packages does not need it")
    return blocking(
        f"{summary}, so nothing can be compiled; only starts from ahead-of-time packages work, and on a GPU those with "
        "all programs in the cache",
        "install g++ (Debian: apt install g++), or set CXX to another C++ compiler",
    )


def _version_of(compiler: str) -> str:
    """The first line of its version, or its name."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, errors="replace", timeout=COMPILER_SECONDS
        )
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().splitlines()[0]
    return compiler


def check_temporary_folder(request: Request) -> Result:
    """The folder for temporary files: set by a variable or Python's default. Python skips one that it cannot write."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        return blocking("there is no writable folder for temporary files", "set TMPDIR to a writable folder")
    variable = next((name for name in TEMPORARY_VARIABLES if os.environ.get(name)), "")
    if variable:
        requested = os.environ[variable]
        try:
            write_test_file(requested)
        except OSError as error:
            return finding(
                f"{variable}={requested} cannot be written: {error.strerror}; {folder} is used instead",
                f"create the folder, or set {variable} to a writable one",
            )
    if is_noexec(folder):
        return finding(
            f"{folder} is mounted with noexec, and starts from packages or from a read-only cache load libraries from "
            "there",
            "set TMPDIR to a folder on another disk",
        )
    return ok(folder)


def is_noexec(folder: str) -> bool:
    """Whether libraries in the folder cannot be loaded."""
    return bool(os.statvfs(folder).f_flag & os.ST_NOEXEC)


def write_test_file(folder: str | Path) -> None:
    """Write a file, which has no name on most disks. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder, prefix=TEST_FILE_PREFIX) as file:
        file.write(b"x" * 4096)
        file.flush()


def check_disk_space(request: Request) -> list[Result]:
    folders = {"the cache folder": (request.cache_folder, MIN_CACHE_BYTES)}
    with contextlib.suppress(FileNotFoundError):  # reported by check_temporary_folder
        folders["temporary files"] = (tempfile.gettempdir(), MIN_TEMPORARY_BYTES)
    results = [_check_space(purpose, folder, needed) for purpose, (folder, needed) in folders.items()]
    problems = [result for result in results if result.state == "finding"]
    return problems or [ok(", ".join(result.summary for result in results))]


def _check_space(purpose: str, folder: str, needed: int) -> Result:
    status = os.statvfs(existing_parent(folder))
    free = status.f_bavail * status.f_frsize
    if free < needed:
        return finding(
            f"{gib(free)} free for {purpose} ({folder}), and a start may need {gib(needed)}",
            "free space on this disk, or use another: --cache-dir DIR, TMPDIR=DIR",
        )
    if status.f_files and not status.f_favail:
        return blocking(f"no inode is free for {purpose} ({folder})", "delete files on this disk")
    return ok(f"{gib(free)} free for {purpose}")


def existing_parent(folder: str | Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    path = Path(os.path.abspath(folder))
    while not os.path.exists(path):  # False also for a path that this user may not look up
        path = path.parent
    return path
