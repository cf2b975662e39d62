"""Finds the model's own line of source in the stacks that torch reports. Does not import torch.

The innermost frame of such a stack is often in torch, in the standard library or in this package. The line to change is
the innermost one outside of these.
"""

from __future__ import annotations

import importlib.util
import linecache
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE)
# A guard, as torch prints it: `(x.size()[1] % 2) == 0  # if x.shape[1] % 2:  # o/modeling_x.py:23 in forward (...)`.
GUARD_COMMENT = re.compile(r"# (?P<code>[^\n]+?) +# (?P<tail>\S+):(?P<line>\d+) in (?P<function>[\w<>.]+)")
SITE_FOLDERS = {"site-packages", "dist-packages"}
PACKAGE_FOLDER = str(Path(__file__).resolve().parent.parent)


@dataclass(frozen=True)
class SourceLine:
    """`file` is "" and `line` is 0 if torch reports no line."""

    file: str = ""
    line: int = 0
    function: str = ""
    code: str = ""


def model_line(frames: Sequence[SourceLine]) -> SourceLine:
    """The innermost line that is not in torch, the standard library or this package; else the innermost one."""
    own = [frame for frame in frames if not _is_foreign(frame.file)]
    return own[-1] if own else frames[-1] if frames else SourceLine()


def parse_stack(text: str) -> list[SourceLine]:
    """The frames of a stack as Python prints it, outermost first."""
    places = [(match["file"], int(match["line"]), match["function"]) for match in FRAME.finditer(text)]
    return [SourceLine(*place, linecache.getline(*place[:2]).strip()) for place in places]


def current_stack() -> list[SourceLine]:
    """The frames of the caller, outermost first."""
    return read_frames(traceback.extract_stack()[:-1])


def read_frames(frames: Iterable[traceback.FrameSummary]) -> list[SourceLine]:
    return [SourceLine(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in frames]


def guard_line(reason: str) -> SourceLine:
    """The line that created the guard of a recompilation, from its stack, else from the comment after it.

    In the comment, torch omits the beginning of the path, so the file is searched among the imported modules.
    """
    if frames := parse_stack(reason):
        return model_line(frames)
    comments = list(GUARD_COMMENT.finditer(reason))
    if not comments:
        return SourceLine()
    code, tail, line, function = comments[-1].group("code", "tail", "line", "function")
    files = dict.fromkeys(getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
    found = (file for file in files if file.endswith(tail) and linecache.getline(file, int(line)).strip() == code)
    return SourceLine(next(found, tail), int(line), function, code)


def _is_foreign(file: str) -> bool:
    if file.startswith("<"):  # generated code
        return True
    path = Path(file)
    is_library = path.is_relative_to(sysconfig.get_path("stdlib")) and not SITE_FOLDERS.intersection(path.parts)
    return is_library or any(path.is_relative_to(folder) for folder in _foreign_folders())


@cache
def _foreign_folders() -> tuple[str, ...]:
    torch = importlib.util.find_spec("torch")
    return (PACKAGE_FOLDER, *(torch.submodule_search_locations or () if torch else ()))
