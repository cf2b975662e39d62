"""The source files of a model, whose digests show later that one of them has changed.

The files that define the model's modules are not enough: modules also call functions in other files, such as those for
rotary frequencies. `model_sources` adds the files of functions that these modules import, `record_executed_files` finds
all that a computation runs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

# Top-level packages whose sources are not hashed file by file: the plan's key has torch's version.
UNHASHED_PACKAGES = {"torch", "tcdeploy", *sys.stdlib_module_names}
PACKAGE = "transformers"
FREE_TOOLS = (3, 4)  # identifiers of sys.monitoring that Python reserves for no kind of tool


def model_sources(model: nn.Module) -> dict[str, str]:
    """The sha256 of each file that defines a class of the model's modules, by Python module, in sorted order.

    Files of functions that these Python modules import are included. Files that these functions use in turn are not:
    the package's version in the plan's key covers them. Raises OSError if a file has been removed.
    """
    kinds = {type(module) for module in model.modules()}
    names = {base.__module__ for kind in kinds for base in kind.__mro__}
    for name in {kind.__module__ for kind in kinds if _is_hashed(kind.__module__)} & sys.modules.keys():
        values = list(vars(sys.modules[name]).values())  # a copy: an import may change the module
        names |= {value.__module__ for value in values if inspect.isfunction(value) and value.__module__}
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in sorted(names) if _is_hashed(name)}
    return {
        name: hashlib.sha256(Path(file).read_bytes()).hexdigest()
        for name, file in files.items()
        if file and file.endswith(".py")
    }


def _is_hashed(module: str) -> bool:
    return module.partition(".")[0] not in UNHASHED_PACKAGES


def source_files(model: nn.Module) -> set[str]:
    """The files that define the classes of the model's modules. Raises OSError if one has been removed."""
    files: set[str] = set()
    for kind in {type(module) for module in model.modules()}:
        with suppress(TypeError):  # a class of a C extension
            files |= {file for file in [inspect.getsourcefile(kind)] if file}
    return files


@contextmanager
def record_executed_files(files: set[str]) -> Iterator[None]:
    """Add to `files` the source file of each Python function that this thread calls within the block.

    From Python 3.12 on, the calls of other threads count too, and each function is recorded only at its first call.
    """
    monitoring: Any = getattr(sys, "monitoring", None)
    tool = next((number for number in FREE_TOOLS if monitoring.get_tool(number) is None), None) if monitoring else None
    with _recording_all_calls(files) if tool is None else _recording_first_calls(files, monitoring, tool):
        yield


@contextmanager
def _recording_all_calls(files: set[str]) -> Iterator[None]:
    """sys.setprofile also reports each call and return of a C function, which slows Python down."""

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    previous = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(previous)


@contextmanager
def _recording_first_calls(files: set[str], monitoring: Any, tool: int) -> Iterator[None]:
    def on_start(code: CodeType, offset: int) -> Any:
        files.add(code.co_filename)
        return monitoring.DISABLE  # for this function

    monitoring.use_tool_id(tool, __name__)
    try:
        monitoring.register_callback(tool, monitoring.events.PY_START, on_start)
        monitoring.restart_events()  # for functions that an earlier block has disabled
        monitoring.set_events(tool, monitoring.events.PY_START)
        yield
    finally:
        monitoring.set_events(tool, monitoring.events.NO_EVENTS)
        monitoring.register_callback(tool, monitoring.events.PY_START, None)
        monitoring.free_tool_id(tool)


def digest_sources(files: Iterable[str]) -> dict[str, str]:
    """The sha256 of those files that belong to transformers, by path relative to its folder."""
    folder = _package_folder()
    if folder is None:
        return {}
    paths = {Path(file) for file in files if Path(file).is_relative_to(folder) and Path(file).is_file()}
    return {path.relative_to(folder).as_posix(): _sha256(path) for path in sorted(paths)}


def changed_sources(digests: dict[str, str]) -> list[str]:
    """The files, as `digest_sources` names them, that differ now; [] if transformers is not installed."""
    folder = _package_folder()
    if folder is None:
        return []
    return [name for name, digest in digests.items() if _sha256(folder / name) != digest]


def _package_folder() -> Path | None:
    """Found without importing the package."""
    spec = importlib.util.find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _sha256(path: Path) -> str:
    """ "" for a file that cannot be read."""
    with suppress(OSError):
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return ""
