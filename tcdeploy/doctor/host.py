"""Checks of the host: cores, memory, the C++ compiler, disks, the network, and environment variables."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import shutil
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tcdeploy.cache.folder.access import write_test_file
from tcdeploy.doctor.result import Request, Result, blocking, finding, note, ok, unchecked
from tcdeploy.errors import RecipeError
from tcdeploy.host.resources import count_cores, host_memory_bytes
from tcdeploy.planning.environment import user_cache_dir
from tcdeploy.planning.extras import is_installed
from tcdeploy.planning.memory import gib
from tcdeploy.planning.recipe import Recipe, build_recipe
from tcdeploy.programs.cxx_runtime import probe_compiler
from tcdeploy.start.record.record import COMPILER_PREFIXES, SET_VARIABLES

COMPILER_SECONDS = 10.0
# About what torch, transformers and the compilers that Inductor starts take.
MIN_MEMORY_BYTES = 4 << 30
MIN_CACHE_BYTES = 256 << 20  # precompiled C++ headers take 156 MB, and the programs of a plan a few MB
MIN_TEMPORARY_BYTES = 64 << 20  # libraries of ahead-of-time packages are loaded from there
TEMPORARY_VARIABLES = ("TMPDIR", "TEMP", "TMP")  # as Python's tempfile reads them
C_COMPILERS = ("gcc", "clang", "cc")
HUB = "https://huggingface.co"
HUB_SECONDS = 5.0
OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


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
        cure = "install g++ again, or set CXX to another compiler"
        return blocking(f"{version} cannot link a library: {probe.failure}", cure)
    if probe.links_runtime_statically:
        return finding(
            f"{version} links libstdc++ statically, so ahead-of-time packages that it builds cannot be loaded",
            "set CXX to a compiler that links it dynamically, for example CXX=/usr/bin/g++, or use --programs jit",
        )
    if request.probe.gpus and not os.environ.get("CC") and not any(map(shutil.which, C_COMPILERS)):
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
        command = [compiler, "--version"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=COMPILER_SECONDS)
        if done.returncode == 0 and done.stdout.strip():
            return done.stdout.strip().splitlines()[0]
    return compiler


def check_temporary_folder(request: Request) -> Result:
    """The folder for temporary files: set by a variable or Python's default. Python skips one that it cannot write."""
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError:
        return blocking("there is no writable folder for temporary files", "set TMPDIR to a writable folder")
    if variable := next((name for name in TEMPORARY_VARIABLES if os.environ.get(name)), ""):
        requested = os.environ[variable]
        try:
            write_test_file(requested)
        except OSError as error:
            summary = f"{variable}={requested} cannot be written: {error.strerror}; {folder} is used instead"
            return finding(summary, f"create the folder, or set {variable} to a writable one")
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


def check_hub(request: Request) -> Result:
    """Whether the Hub answers. The token is not sent."""
    if request.is_offline:
        return ok("not checked: --offline")
    for name in OFFLINE_VARIABLES:
        if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE"):
            return ok(f"offline, as {name}={os.environ[name]} requests: only models on this machine")
    endpoint = os.environ.get("HF_ENDPOINT", HUB)
    shown = "HF_ENDPOINT" if endpoint != HUB else HUB
    if reason := _reason_unreachable(endpoint):
        return finding(
            f"{shown} cannot be reached: {reason}",
            "check the network, HTTPS_PROXY and HF_ENDPOINT; if this machine shall be offline, set HF_HUB_OFFLINE=1",
        )
    return ok(f"{shown} answers; {_describe_token()}")


def _reason_unreachable(endpoint: str) -> str:
    if not endpoint.startswith(("https://", "http://")):
        return "HF_ENDPOINT is not a URL that begins with https://"
    request = urllib.request.Request(endpoint, method="HEAD", headers={"User-Agent": "tcdeploy"})
    try:
        with urllib.request.urlopen(request, timeout=HUB_SECONDS):
            return ""
    except urllib.error.HTTPError as error:
        is_answer = error.code < 500 and error.code != http.client.PROXY_AUTHENTICATION_REQUIRED
        return "" if is_answer else f"status {error.code}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            return f"no answer within {HUB_SECONDS:.0f} s"
        return str(getattr(reason, "strerror", None) or reason or type(reason).__name__)


def _describe_token() -> str:
    for name in TOKEN_VARIABLES:
        if os.environ.get(name):
            return f"the token is in {name}"
    home = Path(os.environ.get("HF_HOME") or Path(user_cache_dir(), "huggingface"))
    path = Path(os.environ.get("HF_TOKEN_PATH") or home / "token")
    return "the token is in a file" if path.is_file() else "no token, which gated models need"


def check_port(request: Request) -> Result:
    """Whether `serve` can listen on the port."""
    try:
        socket.create_server(("127.0.0.1", request.port)).close()
    except OverflowError:
        return blocking(f"port {request.port} is not between 0 and 65535", "pass another --port")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            cure = f"pass another --port to serve, or find the process: ss -ltnp 'sport = :{request.port}'"
            return blocking(f"port {request.port} is in use by another process", cure)
        cure = "pass another --port, from 1024 to 65535"
        return blocking(f"cannot listen on port {request.port}: {error.strerror}", cure)
    return ok(f"{request.port} is free" if request.port else "0: serve selects a free one")


# As torch and Triton read the values.
def _is_one(value: str) -> bool:
    return value == "1"


def _disables(value: str) -> bool:
    """A setting of torch that is forced by a variable: any text but these counts as true."""
    return value in ("0", "")


def _is_true_for_triton(value: str) -> bool:
    return value.lower() in ("1", "true", "on", "yes", "y")


_NO_CACHE = "torch's caches are disabled, so every start compiles everything"
_EAGER = "torch.compile does nothing, so models run uncompiled"
HARMFUL: dict[str, tuple[Callable[[str], bool], str]] = {  # whether a value does harm, and its effect
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": (lambda value: not _disables(value), _NO_CACHE),
    "TORCH_COMPILE_FORCE_DISABLE_CACHES": (lambda value: not _disables(value), _NO_CACHE),
    "TORCHINDUCTOR_FX_GRAPH_CACHE": (_disables, "Inductor's cache is disabled, so every start compiles"),
    "TORCHINDUCTOR_AUTOGRAD_CACHE": (_disables, "AOTAutograd's cache is disabled, so every start compiles"),
    "TORCH_COMPILE_DISABLE": (_is_one, _EAGER),
    "TORCHDYNAMO_DISABLE": (_is_one, _EAGER),
    "TRITON_INTERPRET": (_is_true_for_triton, "Triton kernels run in Python, thousands of times slower"),
    "TRITON_ALWAYS_COMPILE": (_is_true_for_triton, "every start compiles all Triton kernels"),
    "CUDA_LAUNCH_BLOCKING": (_is_one, "each kernel launch waits for the previous one"),
    "TORCH_COMPILE_DEBUG": (_is_one, "torch writes debug files for each program, and compiles slowly"),
}


def check_variables(request: Request) -> list[Result]:
    results = []
    try:  # every command on a model refuses unknown and invalid TCDEPLOY_ variables
        recipe_from_variables(request)
    except RecipeError as error:
        results.append(blocking(error.message, error.hint))
    for name, (does_harm, effect) in HARMFUL.items():
        value = os.environ.get(name)
        if value is not None and does_harm(value):
            results.append(finding(f"{name}={value}: {effect}", f"unset {name}"))
    known = {*SET_VARIABLES, *HARMFUL}
    if others := sorted(name for name in os.environ if name.startswith(COMPILER_PREFIXES) and name not in known):
        text = f"may change programs, so a cache that was filled without them misses: {', '.join(others)}"
        results.append(note(text))
    return results or [ok("none that changes compilation or disables caches")]


def recipe_from_variables(request: Request) -> Recipe:
    """The recipe of a start without flags. Raises RecipeError."""
    model = "builtin:tiny"  # any: a recipe needs one
    return build_recipe({"model": model}, other_variables=request.other_variables)
