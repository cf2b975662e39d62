"""The C++ compiler that built a CPU's programs, and a stub for machines without one.

Inductor queries the compiler's version even if every program is cached: the version is part of file names, and without
a compiler Inductor gives up. The compiler's output for these queries is therefore kept in the cache folder. On a
machine without a compiler, a script of the same name on PATH replays it. Any other command of the stub fails with
NO_COMPILER_MESSAGE.

torch_compat/inductor/compiler_queries.py lists Inductor's queries.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from tcdeploy.cache.folder.layout import TOOLCHAIN_DIR
from tcdeploy.cache.record.listed_files import read_listed
from tcdeploy.cache.record.provenance import SigningPolicy
from tcdeploy.cache.trust.signing import default_trusted_keys_folder
from tcdeploy.host.durable import write_durably
from tcdeploy.host.temporary_files import create_temporary_folder
from tcdeploy.torch_compat.inductor.compiler_queries import COMPILER_QUERIES

COMPILER = "g++"  # Inductor's default without CXX
NO_COMPILER_MESSAGE = "tcdeploy: no C++ compiler is installed here, and this program is not in the cache"


class CompilerOutput(NamedTuple):
    stdout: str
    stderr: str


class Toolchain(NamedTuple):
    """The recorded output of a compiler by query. `path`: the file that holds it, relative to the cache folder."""

    path: str
    outputs: dict[str, CompilerOutput]

    @property
    def version(self) -> str:
        """The first line of the version, as in `Environment.compiler`."""
        return self.outputs["--version"].stdout.partition("\n")[0].strip()


def is_compiler_missing() -> bool:
    return "CXX" not in os.environ and shutil.which(COMPILER) is None


def save_toolchain(folder: str | Path) -> str | None:
    """Record this machine's compiler in the cache folder and return the file's path in it.

    None without a compiler, and if CXX names another compiler.
    """
    if is_compiler_missing() or "CXX" in os.environ:
        return None
    document = json.dumps({query: _run_query(query) for query in COMPILER_QUERIES}, indent=1)
    path = Path(folder) / TOOLCHAIN_DIR / f"{hashlib.sha256(document.encode()).hexdigest()[:16]}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, document.encode())
    return path.relative_to(folder).as_posix()


def _run_query(query: str) -> CompilerOutput:
    environment = {**os.environ, "LC_ALL": "C"}
    completed = subprocess.run([COMPILER, *query.split()], capture_output=True, text=True, env=environment)
    return CompilerOutput(completed.stdout, completed.stderr)


def load_toolchains(folder: str | Path) -> list[Toolchain]:
    """The compilers that the folder's plans list; unreadable files are skipped."""
    policy, toolchains = SigningPolicy(default_trusted_keys_folder()), dict[str, Toolchain]()
    for listed in read_listed(folder, f"{TOOLCHAIN_DIR}/", ".json", policy).files:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            document = json.loads(listed.content)
            outputs = {query: CompilerOutput(*document[query]) for query in COMPILER_QUERIES}
            if all(isinstance(text, str) for output in outputs.values() for text in output):
                toolchains[listed.path] = Toolchain(listed.path, outputs)
    return [toolchains[path] for path in sorted(toolchains)]


def install_compiler_stub(toolchain: Toolchain) -> None:
    """Put the stub on PATH for this process and its children. Raises OSError if TMPDIR is not writable."""
    folder, _ = create_temporary_folder("toolchain")  # its lock is held until the process ends
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    script = folder / COMPILER
    script.write_text(_stub_script(toolchain), encoding="utf-8")
    script.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join([str(folder), os.environ.get("PATH", "")]).rstrip(os.pathsep)


def _stub_script(toolchain: Toolchain) -> str:
    cases = [
        f"{shlex.quote(query)}) printf %s {shlex.quote(output.stdout)}; printf %s {shlex.quote(output.stderr)} >&2 ;;"
        for query, output in toolchain.outputs.items()
    ]
    return "\n".join(
        ["#!/bin/sh", 'case "$*" in', *cases, f"*) echo {shlex.quote(NO_COMPILER_MESSAGE)} >&2; exit 1 ;;", "esac\n"]
    )
