"""Checks the interpreter, and that the packages of an optional extra are installed. Imports neither them nor torch.

An installation without extras is enough to unpack, verify and push bundles. Serving and compiling need more packages,
and an image that only serves bundles should not contain transformers. The command that installs an extra depends on
how tcdeploy was installed (installation.py).
"""

from __future__ import annotations

import importlib.util
import sys

from tcdeploy.errors import UsageError
from tcdeploy.planning.installation import install_command

# The required modules of each extra (uvloop is optional). A test compares them with pyproject.toml.
EXTRA_MODULES = {
    "compile": ("transformers",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "ray": ("ray",),
    "serve": ("pydantic", "starlette", "uvicorn", "httptools", "prometheus_client", "typing_extensions"),
    "structured": ("llguidance",),
}
WITHOUT_DOCSTRINGS = 2  # sys.flags.optimize of `python -OO`


def check_interpreter() -> None:
    """Raise UsageError on another system than Linux, and under `python -OO`.

    transformers 5 reads docstrings when it imports a model's classes.
    """
    if sys.platform != "linux":
        message = f"tcdeploy runs models on Linux only, and this system is {sys.platform}"
        raise UsageError(message, "run it on a Linux machine, in a container or in WSL 2")
    if sys.flags.optimize >= WITHOUT_DOCSTRINGS:
        level = f"optimization level {sys.flags.optimize} (-OO or PYTHONOPTIMIZE)"
        message = f"Python runs with {level}, which removes the docstrings that transformers needs to build a model"
        raise UsageError(message, "use PYTHONOPTIMIZE=1 or -O, which removes only assertions")


def require_extra(extra: str, purpose: str, hint: str = "") -> None:
    """Raise UsageError if a package of `extra` is not installed. `purpose` completes "NAME is needed to ..."."""
    for name in EXTRA_MODULES[extra]:
        if not is_installed(name):
            message = f"{name} is not installed, and it is needed to {purpose}"
            raise UsageError(message, hint or install_command(extra))


def require_compile_extra() -> None:
    """Raise UsageError unless models can be loaded and compiled."""
    require_extra("compile", "load and compile a model", compile_hint())


def compile_hint() -> str:
    return (
        f"{install_command('compile')}; without it, a model starts only from ahead-of-time packages in the cache "
        "folder (--programs aot)"
    )


def is_installed(name: str) -> bool:
    """Of a submodule, this imports the packages above it."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a package above it is not installed
        return False
