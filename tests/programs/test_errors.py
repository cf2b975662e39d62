"""Errors of the C++ compiler carry its own first error line and the file that it compiled."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit
from torch._inductor import cpp_builder
from torch._inductor.exc import CppCompileError, InductorError
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

from tcdeploy.errors import CompileError, SpaceError, TcdeployError
from tcdeploy.planning.plan import Plan
from tcdeploy.programs.errors import translate_compile_errors
from tests.conftest import TINY

SOURCE = "/cache/kz/ckz.main.cpp"
COMMAND = ["g++", SOURCE, "-D", "X", "-shared", "-include", "/cache/headers/c.h", "-o", "/cache/kz/ckz.main.so"]
OUTPUT = """\
In file included from /torch/include/vec.h:5:
/torch/include/vec512.h:12:7: warning: overflow in conversion
<command-line>: fatal error: cannot read PCH file: No such file or directory
compilation terminated.
"""


def translate(error: Exception, plan: Any, folder: Path) -> TcdeployError:
    with pytest.raises(TcdeployError) as translated, translate_compile_errors(plan, str(folder)):
        raise error
    return translated.value


@pytest.fixture
def plan() -> Any:
    return Plan.__new__(Plan)  # no field is read


def with_model(plan: Any, model: str) -> Any:
    object.__setattr__(plan, "model", model)
    return plan


def chained(error: Exception) -> Exception:
    try:
        raise RuntimeError("in a worker") from error
    except RuntimeError as outer:
        return InductorError(outer, None)


@pytest.mark.parametrize(
    "wrap", [lambda error: InductorError(error, None), lambda error: BackendCompilerFailed("x", error, None), chained]
)
def test_the_first_error_line_and_the_file_are_in_the_message(wrap: Any, plan: Any, tmp_path: Path) -> None:
    error = translate(wrap(CppCompileError(COMMAND, OUTPUT)), plan, tmp_path)
    assert type(error) is CompileError
    assert error.message == (
        f"the C++ compiler failed on {SOURCE}: "
        "<command-line>: fatal error: cannot read PCH file: No such file or directory"
    )
    assert error.hint.startswith("run again")


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("", "it printed no message"),
        ("\ncp: cannot stat 'a'\nb", "cp: cannot stat 'a'"),
        ("x.cpp:3:1: internal compiler error: Segmentation fault", "internal compiler error: Segmentation fault"),
    ],
)
def test_a_compiler_may_fail_in_other_words(output: str, message: str, plan: Any, tmp_path: Path) -> None:
    error = translate(InductorError(CppCompileError(COMMAND, output), None), plan, tmp_path)
    assert error.message.startswith(f"the C++ compiler failed on {SOURCE}: ") and error.message.endswith(message)


@pytest.mark.parametrize("command", [["false"], ["sh", "-c", "kill -9 $$"]])
def test_a_compiler_without_a_message_shows_its_exit_status(command: list[str], plan: Any, tmp_path: Path) -> None:
    with pytest.raises(CppCompileError) as failure:
        cpp_builder.run_compile_cmd(shlex.join(command), cwd=str(tmp_path))
    error = translate(InductorError(failure.value, None), plan, tmp_path)
    status = "1" if command == ["false"] else "-9"
    assert error.message.endswith(f"it printed no message and exited with status {status}")


def test_a_compiler_without_memory_exits_with_code_7(plan: Any, tmp_path: Path) -> None:
    output = "g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.\n"
    error = translate(InductorError(CppCompileError(COMMAND, output), None), plan, tmp_path)
    assert isinstance(error, SpaceError) and "Killed signal" in error.message and "memory" in error.hint


def test_too_many_programs_are_an_error_with_a_hint(plan: Any, tmp_path: Path) -> None:
    """torch's class derives from Exception, unlike its other errors."""
    error = translate(FailOnRecompileLimitHit("Hard failure due to fullgraph=True"), with_model(plan, "x"), tmp_path)
    assert isinstance(error, CompileError)
    assert error.message.startswith("x exceeds torch.compile's recompile limit: Hard failure")
    assert "--region blocks" in error.hint


def test_a_cold_start_names_the_error_of_its_compiler(run_cli: Any, tmp_path: Path) -> None:
    """A g++ that fails on every program, and answers the questions that precede it."""
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *" -shared "*) echo "kernel.cpp:1:2: error: no such thing" >&2; exit 1;; esac\n'
        f'PATH="{os.environ["PATH"]}"; exec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    result = run_cli(
        "warm", TINY, "--buckets", "16", "--batch-sizes", "1", "--programs", "jit",
        "--cache-dir", str(tmp_path / "cache"),
        PATH=f"{compiler.parent}{os.pathsep}{os.environ['PATH']}",
    )  # fmt: skip
    [message, hint] = result.stderr.splitlines()[-2:]
    assert result.returncode == 1
    assert message.startswith(f"error: the C++ compiler failed on {tmp_path / 'cache'}") and ".cpp: " in message
    assert message.endswith("kernel.cpp:1:2: error: no such thing")
    assert hint.startswith("hint: run again")


def test_code_that_depends_on_a_symbolic_size_is_an_error_with_a_hint(plan: Any, tmp_path: Path) -> None:
    text = (
        "Constraints violated (L['args'][0].size()[1])! For more information, run with TORCH_LOGS=\"+dynamic\".\n"
        "  - Not all values of L['args'][0].size()[1] = L['args'][0].size()[1] in the specified range "
        "L['args'][0].size()[1] <= 512 satisfy the generated guard (L['args'][0].size()[1] % 2) != 0."
    )
    error = translate(ConstraintViolationError(text), with_model(plan, "some/model"), tmp_path)
    assert type(error) is CompileError
    assert error.message.endswith("no program is valid for all lengths: (L['args'][0].size()[1] % 2) != 0")
    assert error.hint.startswith("tcdeploy explain MODEL")
