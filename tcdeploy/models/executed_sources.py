"""Which source files of transformers a computation runs, so that a change of one of them can be noticed later.

The files that define the model's modules are not enough: modules also call functions in other files, such as those for
rotary frequencies.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

PACKAGE = "transformers"


@contextmanager
def record_executed_files(files: set[str]) -> Iterator[None]:
    """Add to `files` the source file of each Python function that this thread calls within the block."""

    def on_event(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    previous = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield
    finally:
        sys.setprofile(previous)


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
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""
