"""Checks of Python and the installed packages: versions, imports, bytecode, private names of other packages."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
import tempfile
from pathlib import Path

from tcdeploy.doctor.host import existing_parent
from tcdeploy.doctor.result import Request, Result, blocking, finding, missing, note, ok, unchecked
from tcdeploy.errors import UsageError
from tcdeploy.host.stages import MANY_WITHOUT_BYTECODE
from tcdeploy.planning.backends import BACKENDS
from tcdeploy.planning.environment import installed_flash_packages, installed_version
from tcdeploy.planning.extras import EXTRA_MODULES, check_interpreter, compile_hint, is_installed
from tcdeploy.planning.installation import install_command
from tcdeploy.planning.tested_versions import is_older_than_tested, tested_range, untested_packages

MAX_MISSING_NAMES = 5  # private names that are reported with their consequences


def check_python(request: Request) -> Result:
    try:
        check_interpreter()
    except UsageError as error:
        return blocking(error.message, error.hint)
    return ok(f"{platform.python_implementation()} {platform.python_version()}")


def check_torch(request: Request) -> Result:
    version = installed_version("torch")
    if not version and not is_installed("torch"):
        return blocking("torch is not installed", "install the PyTorch build for your GPU: https://pytorch.org")
    if old := _too_old("torch", version):
        return old
    described = request.probe.sections.get("torch")
    if described is None:
        cure = "install torch again, or another build of it"
        return missing(request, "torch", f"torch {version} cannot be imported", cure)
    built_for = f"built for CUDA {described['cuda']}" if described["cuda"] else "built for CPUs"
    return _with_tested_range("torch", f"{described['version']}, {built_for}")


def check_triton(request: Request) -> Result:
    version, needed = installed_version("triton"), _triton_version_of_torch()
    if not version and not request.probe.gpus:
        return note("not installed; only GPUs need it")
    if not version:
        return blocking("Triton is not installed", f"pip install triton{f'=={needed}' if needed else ''}")
    if old := _too_old("triton", version):
        return old
    if needed and needed != version:
        summary = f"Triton {version} is installed, and torch {installed_version('torch')} requires {needed}"
        return finding(summary, f"pip install triton=={needed}")
    return _with_tested_range("triton", version)


def check_transformers(request: Request) -> Result:
    version = installed_version("transformers")
    if not version:
        return note("not installed: models start only from ahead-of-time packages", compile_hint())
    if old := _too_old("transformers", version):
        return old
    if "transformers" in request.probe.sections:
        return _with_tested_range("transformers", version)
    summary = f"transformers {version} cannot be imported"
    return missing(request, "transformers", summary, install_command("compile"))


def check_server_packages(request: Request) -> Result:
    if lacking := [name for name in EXTRA_MODULES["serve"] if not is_installed(name)]:
        return note(f"not installed: {', '.join(lacking)}; `serve` needs them", install_command("serve"))
    if not is_installed("llguidance"):
        return note("llguidance is not installed; JSON schemas and grammars need it", install_command("structured"))
    return _with_tested_range("uvicorn", f"uvicorn {installed_version('uvicorn')}")


def check_flash_packages(request: Request) -> Result:
    packages = installed_flash_packages()
    if not packages:
        return ok("none; attention uses our Triton kernels on a GPU")
    installed = ", ".join(f"{name} {version}" for name, version in packages)
    gpus = request.probe.gpus
    if not gpus:
        return note(f"{installed}; without a GPU they are not used")
    majors = {name: BACKENDS[name].capability_majors for name, _ in packages}  # type: ignore[index]
    unusable = [name for name, allowed in majors.items() if allowed and gpus[0]["capability"][0] not in allowed]
    return note(f"{installed}; not for this GPU: {', '.join(unusable)}") if unusable else ok(installed)


def check_internals(request: Request) -> Result | list[Result]:
    lacking = request.probe.sections.get("internals")
    if lacking is None:
        return unchecked(request.probe.reason("internals"))
    if not lacking:
        return ok("all that tcdeploy uses exist in the installed versions")
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return unchecked("modules of torch cannot be imported without a writable folder for temporary files")
    cure = f"install a tested version: torch {tested_range('torch')}, transformers {tested_range('transformers')}"
    if len(lacking) > MAX_MISSING_NAMES:
        return finding(f"{len(lacking)} are missing: {', '.join(name for name, _ in lacking)}", cure)
    return [finding(f"{name}: {consequence}", cure) for name, consequence in lacking]


def check_bytecode(request: Request) -> Result:
    uncompiled = request.probe.sections.get("uncompiled")
    if uncompiled is None:
        return unchecked(request.probe.reason("uncompiled"))
    folder = sys.pycache_prefix or _folder_of("torch")
    will_be_written = not sys.dont_write_bytecode and os.access(existing_parent(folder), os.W_OK)
    return judge_bytecode(uncompiled, will_be_written)


def judge_bytecode(uncompiled: dict[str, int], will_be_written: bool) -> Result:
    """`uncompiled`: modules without bytecode by package, of those that a start imports."""
    total = sum(uncompiled.values())
    if total < MANY_WITHOUT_BYTECODE:
        return ok(f"{total or 'no'} imported modules without bytecode")
    packages = sorted(uncompiled, key=lambda name: -uncompiled[name])[:3]
    counts = ", ".join(f"{name} {uncompiled[name]}" for name in packages)
    summary = f"{total} imported modules have no bytecode ({counts})"
    if will_be_written:
        return note(f"{summary}: the next start compiles them, which takes seconds")
    return finding(
        f"{summary}, so every start compiles them: up to 16 s",
        "as the owner of the packages: env -u PYTHONDONTWRITEBYTECODE python -m compileall -q "
        f"{_folder_of(packages[0])}; in an image, do not set PYTHONDONTWRITEBYTECODE",
    )


def _folder_of(package: str) -> str:
    """The folder that contains an installed package."""
    spec = importlib.util.find_spec(package)
    return str(Path(spec.origin).parent.parent) if spec is not None and spec.origin else "site-packages"


def _too_old(package: str, version: str) -> Result | None:
    if not version or not is_older_than_tested(package, version):
        return None
    tested = tested_range(package)
    cure = f"pip install '{package}>={tested.partition(' ')[0]}'"
    return blocking(f"{package} {version} is too old; tested are {tested}", cure)


def _with_tested_range(package: str, summary: str) -> Result:
    """A note if the installed version is not a tested one."""
    if untested_packages({package: installed_version(package)}):
        return note(f"{summary}; not tested: the tested versions are {tested_range(package)}")
    return ok(summary)


def _triton_version_of_torch() -> str:
    """The version of Triton that the installed torch requires; "" if it requires none."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for requirement in importlib.metadata.requires("torch") or ():
            if match := re.match(r"triton\s*==\s*([\w.]+)", requirement):
                return match[1]
    return ""
