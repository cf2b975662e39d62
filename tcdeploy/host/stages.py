"""Measures the time of a start by stage, and that of its imports by package.

Imports can take half of a warm start, and much of that is for packages that torch and transformers import. Without
bytecode, for example in a container image that was built with PYTHONDONTWRITEBYTECODE, they take up to three times as
long. Does not import torch.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.machinery import ExtensionFileLoader, ModuleSpec, SourceFileLoader
from types import FrameType, ModuleType
from typing import Any

from tcdeploy.host.gc_policy import freeze_imported_objects
from tcdeploy.host.progress import Progress

SHOWN_PACKAGES = 3
MANY_WITHOUT_BYTECODE = 200  # modules; compiling them takes about a second


class ImportTimer:
    """Measures the imports of the thread that calls `start`, until `stop`, by top-level package."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)  # without those of modules that a module imports
        self.without_bytecode: Counter[str] = Counter()  # modules that Python had to compile, by package
        self.not_kept: Counter[str] = Counter()  # those of them whose bytecode Python has not written
        self._nested = [0.0]  # seconds of the modules that each module being imported has imported so far
        self._thread = 0
        self._originals: list[tuple[Any, str, Any]] = []
        self._depth = 0  # calls of `start` without their `stop`

    def start(self) -> None:
        """Patch the loaders of Python, which have no hook for this, until the `stop` that belongs to this call.

        Also patch `inspect.getmodule`, which makes half of the `stat` calls of an import of torch and transformers.
        """
        self._depth += 1
        if self._depth > 1:
            return
        self._thread = threading.get_ident()
        self._originals.append((inspect, "getmodule", inspect.getmodule))
        inspect.getmodule = partial(_find_module, inspect.getmodule)
        for loader in (SourceFileLoader, ExtensionFileLoader):
            for name in ("create_module", "exec_module"):
                self._originals.append((loader, name, loader.__dict__.get(name)))
                setattr(loader, name, self._timed(getattr(loader, name)))

    def stop(self) -> None:
        self._depth -= 1
        if self._depth:
            return
        for loader, name, original in reversed(self._originals):
            if original is None:  # inherited
                delattr(loader, name)
            else:
                setattr(loader, name, original)
        self._originals.clear()

    def sorted_seconds(self) -> dict[str, float]:
        """`seconds`, longest first."""
        return dict(sorted(self.seconds.items(), key=lambda item: item[1], reverse=True))

    @contextmanager
    def measure(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()

    def _timed(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """`load` is called with the loader, and with a module to execute or the specification of one to create."""

        def timed_load(loader: Any, target: ModuleType | ModuleSpec) -> Any:
            spec = target.__spec__ if isinstance(target, ModuleType) else target
            if spec is None or threading.get_ident() != self._thread:
                return load(loader, target)
            package = spec.name.partition(".")[0]
            bytecode = spec.cached if isinstance(target, ModuleType) else None
            is_compiled = bytecode is not None and not os.path.exists(bytecode)
            start = time.perf_counter()
            self._nested.append(0.0)
            try:
                return load(loader, target)
            finally:
                seconds = time.perf_counter() - start
                if bytecode is not None and is_compiled:
                    self.without_bytecode[package] += 1
                    self.not_kept[package] += not os.path.exists(bytecode)
                self.seconds[package] += seconds - self._nested.pop()
                self._nested[-1] += seconds

        return timed_load


def _find_module(find: Callable[..., ModuleType | None], *args: Any, **kwargs: Any) -> ModuleType | None:
    """As `find` (inspect.getmodule), but the module of a frame is looked up by name.

    `find` resolves the paths of all imported modules, and an import of torch calls it for 150 frames.
    """
    if args and isinstance(frame := args[0], FrameType):
        module = sys.modules.get(frame.f_globals.get("__name__", ""))
        if module is not None and getattr(module, "__file__", None) == frame.f_code.co_filename:
            return module
    return find(*args, **kwargs)


def describe_imports(seconds: Mapping[str, float]) -> str:
    """The packages that took longest to import, and all others together."""
    shown = sorted(seconds.items(), key=lambda item: item[1], reverse=True)[:SHOWN_PACKAGES]
    others = sum(seconds.values()) - sum(value for _, value in shown)
    return ", ".join([*(f"{name} {value:.1f} s" for name, value in shown), f"others {others:.1f} s"])


def describe_missing_bytecode(not_kept: Counter[str]) -> str:
    """A warning if the next start will compile many modules again; empty otherwise."""
    if not_kept.total() < MANY_WITHOUT_BYTECODE:
        return ""
    packages = ", ".join(f"{name} {count}" for name, count in not_kept.most_common(3))
    return (
        f"Python compiled {not_kept.total()} modules from source ({packages}), which delays each start "
        "by seconds; keep their bytecode: unset PYTHONDONTWRITEBYTECODE, or run `python -m compileall` on the "
        "installed packages"
    )


import_timer = ImportTimer()  # of this process
_import_seconds = 0.0


class ImportStage:
    """Counts the time from its creation until `end` as the stage `import` of starts that begin afterwards.

    For the top of a module, whose imports no `with` block can hold.
    """

    def __init__(self) -> None:
        self._start = time.perf_counter()
        import_timer.start()

    def end(self) -> None:
        global _import_seconds
        import_timer.stop()
        freeze_imported_objects()
        _import_seconds += time.perf_counter() - self._start


@dataclass
class StageTimer:
    """Seconds of each stage, in order. A stage may run several times."""

    progress: Progress
    seconds: dict[str, float] = field(default_factory=lambda: {"import": _import_seconds})

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.progress.stage(name)
        start = time.perf_counter()
        try:
            with import_timer.measure():
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
