"""The C++ compiler that made a CPU's programs, and a stand-in for it on a machine that has none.

A warm start compiles nothing, and still Inductor asks the compiler who it is: the answer is part of the names of what
it made, and without one it gives up. So what the compiler answers is kept beside the programs, and where no compiler
is found, a script of its name gives those answers. Asked to compile, it fails and says why.

torch_compat/compiler_queries.py lists what Inductor asks.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from tcdeploy.torch_compat.compiler_queries import COMPILER_QUERIES

COMPILER = "g++"  # Inductor's own choice, unless CXX names another
TOOLCHAIN_DIR = "toolchain"
NO_COMPILER_MESSAGE = "tcdeploy: no C++ compiler is installed here, and this program is not in the cache"


class CompilerOutput(NamedTuple):
    stdout: str
    stderr: str


class Toolchain(NamedTuple):
    """A compiler, as its answers: `path` is the file that keeps them, relative to the cache folder."""

    path: str
    outputs: dict[str, CompilerOutput]

    @property
    def version(self) -> str:
        """The first line, which `Environment.compiler` holds."""
        return self.outputs["--version"].stdout.partition("\n")[0].strip()


def is_compiler_missing() -> bool:
    return "CXX" not in os.environ and shutil.which(COMPILER) is None


def save_toolchain(folder: str | Path) -> str | None:
    """Keep this machine's answers in the cache folder; the file's place in it, or None where there is no compiler."""
    if is_compiler_missing() or "CXX" in os.environ:
        return None
    document = json.dumps({query: _run_query(query) for query in COMPILER_QUERIES}, indent=1)
    path = Path(folder) / TOOLCHAIN_DIR / f"{hashlib.sha256(document.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = path.with_suffix(f".{os.getpid()}.tmp")
        staging.write_text(document, encoding="utf-8")
        os.replace(staging, path)
    return path.relative_to(folder).as_posix()


def _run_query(query: str) -> CompilerOutput:
    asked = subprocess.run(
        [COMPILER, *query.split()], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"}
    )
    return CompilerOutput(asked.stdout, asked.stderr)


def load_toolchains(folder: str | Path) -> list[Toolchain]:
    """What compilers have left their answers in the folder; a file that is not one is passed over."""
    found = []
    for path in sorted(Path(folder, TOOLCHAIN_DIR).glob("*.json")):
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            outputs = {query: CompilerOutput(*document[query]) for query in COMPILER_QUERIES}
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found.append(Toolchain(path.relative_to(folder).as_posix(), outputs))
    return found


def install_compiler_stub(toolchain: Toolchain) -> None:
    """From here on this process, and those that it starts, find a compiler that answers and cannot compile.

    Raises OSError where no script can be written into the folder for temporary files.
    """
    folder = tempfile.mkdtemp(prefix="tcdeploy-toolchain-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    script = Path(folder) / COMPILER
    script.write_text(_stub_script(toolchain), encoding="utf-8")
    script.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", "")]).rstrip(os.pathsep)


def _stub_script(toolchain: Toolchain) -> str:
    cases = [
        f"{shlex.quote(asked)}) printf %s {shlex.quote(output.stdout)}; printf %s {shlex.quote(output.stderr)} >&2 ;;"
        for asked, output in toolchain.outputs.items()
    ]
    return "\n".join(
        ["#!/bin/sh", 'case "$*" in', *cases, f"*) echo {shlex.quote(NO_COMPILER_MESSAGE)} >&2; exit 1 ;;", "esac\n"]
    )
