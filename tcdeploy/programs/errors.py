"""Translates what torch raises while it compiles: graph breaks, a full disk, a missing C++ compiler, no GPU memory."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator

import torch

from tcdeploy.errors import CompileError, SpaceError
from tcdeploy.planning.plan import Plan
from tcdeploy.torch_compat.dynamo.compile_errors import (
    CONSTRAINT_VIOLATION,
    RECOMPILE_LIMIT,
    UNSUPPORTED,
    CompilerFailure,
    causes,
    find_compiler_failure,
    is_compile_error,
)

NEARLY_FULL_BYTES = 1 << 20
MAX_MESSAGE_CHARS = 400  # of a message of torch or of the C++ compiler
# GCC's messages if it runs out of memory.
OUT_OF_MEMORY = ("Killed signal terminated program", "out of memory allocating", "virtual memory exhausted")


@contextlib.contextmanager
def translate_compile_errors(plan: Plan, cache_dir: str) -> Iterator[None]:
    """Raise CompileError or SpaceError in place of torch's errors."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise SpaceError(
            f"the GPU ran out of memory during warm-up: {str(error).splitlines()[0]}",
            "lower --memory-fraction, or leave out the largest bucket",
        ) from error
    except Exception as error:  # some of torch's compile errors do not derive from RuntimeError
        may_be_disk = isinstance(error, RuntimeError) and _is_disk_full(error, cache_dir)
        if isinstance(error, OSError) or is_compile_error(error) or may_be_disk:
            raise _translate_error(error, plan, cache_dir) from error
        raise


def _translate_error(error: BaseException, plan: Plan, cache_dir: str) -> Exception:
    if _is_disk_full(error, cache_dir):
        free = shutil.disk_usage(cache_dir).free
        return SpaceError(
            f"the disk of the cache folder {cache_dir} is full, or was in the step that failed "
            f"({free / 1e6:.0f} MB are free now)",
            "cached programs are intact: free some space, or pass another --cache-dir, and run again",
        )
    text = str(error).strip()
    if is_compile_error(error, UNSUPPORTED):
        hint = "tcdeploy explain MODEL shows the line and its cure"
        if plan.region == "layer":
            hint += "; --region blocks compiles attention and MLP apart, --graphs none leaves norm and head uncompiled"
        return CompileError(f"{plan.model} has a graph break with --region {plan.region}: {text.splitlines()[0]}", hint)
    if is_compile_error(error, CONSTRAINT_VIOLATION):
        condition = text.rpartition("the generated guard ")[2].splitlines()[0].rstrip(".")
        return CompileError(
            f"the code of {plan.model} depends on the number of tokens, so no program is valid for all lengths: "
            f"{condition}",
            "tcdeploy explain MODEL shows the line; --buckets LIST compiles programs for fixed lengths",
        )
    if is_compile_error(error, RECOMPILE_LIMIT):
        return CompileError(
            f"{plan.model} exceeds torch.compile's recompile limit: {_first_sentence(text)}",
            "try --region blocks, or fewer --buckets and --batch-sizes",
        )
    if "InvalidCxxCompiler" in text:  # the names of cached CPU programs contain its version
        return CompileError(
            f"the programs of {plan.model} can be neither compiled nor found in the cache folder {cache_dir}, because "
            "there is no C++ compiler",
            "install g++, or start from ahead-of-time packages, which need none: tcdeploy cache pack MODEL "
            "--programs aot, on a machine with g++",
        )
    if failure := find_compiler_failure(error):
        return _translate_compiler_failure(failure)
    return CompileError(
        f"torch.compile failed on {plan.model}: {_first_sentence(text)[:MAX_MESSAGE_CHARS]}",
        "TCDEPLOY_DEBUG=1 shows the traceback",
    )


def _translate_compiler_failure(failure: CompilerFailure) -> Exception:
    message = f"the C++ compiler failed on {failure.source}: {_first_compiler_error(failure)}"
    if any(words in failure.output for words in OUT_OF_MEMORY):
        return SpaceError(message, "free some host memory, and run again: the next start reuses the finished buckets")
    return CompileError(message, "run again; if it fails again, TCDEPLOY_DEBUG=1 shows the command and all its output")


def _first_compiler_error(failure: CompilerFailure) -> str:
    """The first line with "error:", as g++, clang++ and the linker write it; else the first line."""
    lines = [line.strip() for line in failure.output.splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    if not lines and failure.status is not None:
        return f"it printed no message and exited with status {failure.status}"
    return next(iter(errors or lines), "it printed no message")[:MAX_MESSAGE_CHARS]


def _first_sentence(text: str) -> str:
    """The first line that does not end in a colon, with the introductory lines before it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = next((number for number, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return " ".join(lines[: last + 1])


def _is_disk_full(error: BaseException, cache_dir: str) -> bool:
    """Whether an error in the chain reports a full disk, or, as a compiler may not say so, the disk is full now."""
    for cause in causes(error):
        if getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(cause):
            return True
    return shutil.disk_usage(cache_dir).free < NEARLY_FULL_BYTES
