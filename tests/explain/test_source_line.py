"""The reported line is the innermost one of the model, not one of torch, the standard library or this package."""

from __future__ import annotations

import ctypes
import inspect
from pathlib import Path

import torch
import transformers

import tcdeploy.start.model_code
from tcdeploy.explain.source_line import SourceLine, current_stack, guard_line, model_line, parse_stack

STANDARD_LIBRARY, TORCH, OURS, TRANSFORMERS = (
    module.__file__ or "" for module in (ctypes, torch, tcdeploy.start.model_code, transformers)
)


def test_frames_of_torch_the_standard_library_and_this_package_are_skipped() -> None:
    frames = [SourceLine(file, 1) for file in (OURS, TORCH, "/m/modeling_x.py", STANDARD_LIBRARY, TORCH, OURS)]
    assert model_line(frames).file == "/m/modeling_x.py"
    assert model_line([SourceLine(TRANSFORMERS, 3), SourceLine("<string>", 1)]).file == TRANSFORMERS
    assert model_line([SourceLine(TORCH, 5)]).line == 5
    assert model_line([]) == SourceLine()


def test_a_stack_is_read_with_its_lines_of_source() -> None:
    number = inspect.currentframe().f_lineno  # type: ignore[union-attr]
    text = f'Traceback:\n  File "{__file__}", line {number}, in test\n    x()\n  File "/gone.py", line 7, in f\n'
    first, second = parse_stack(text)
    assert first.code.startswith("number = inspect") and (second.file, second.line, second.code) == ("/gone.py", 7, "")


def test_the_current_stack_ends_in_its_caller() -> None:
    assert model_line(current_stack()).function == "test_the_current_stack_ends_in_its_caller"


def test_the_line_of_a_guard_is_found_from_a_shortened_path() -> None:
    number = inspect.currentframe().f_lineno  # type: ignore[union-attr]
    code = Path(__file__).read_text().splitlines()[number - 1].strip()
    tail = __file__[-15:]
    reason = f"0/1: (x.size()[1] % 2) == 0  # {code}  # {tail}:{number} in forward (_dynamo/symbolic_convert.py:9 in f)"
    assert guard_line(reason) == SourceLine(__file__, number, "forward", code)
    unknown = guard_line(reason.replace(code, "if x:"))
    assert (unknown.file, unknown.line) == (tail, number)
    assert guard_line("0/0: tensor 'x' size mismatch at index 1") == SourceLine()
