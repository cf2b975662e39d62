"""Recognise exceptions that torch.compile raises.

Their classes are defined in private modules, of which only names are used; nothing is imported. A class that torch
moves is at worst not recognised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tcdeploy.torch_compat.internal import find, has_parameters, internal

PRIVATE_MODULES = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx.experimental")
UNSUPPORTED = "Unsupported"  # Dynamo's: a graph break under fullgraph=True
# Dynamo's: a function has as many programs as torch allows. Derives from Exception, not from TorchDynamoException.
RECOMPILE_LIMIT = "FailOnRecompileLimitHit"
CONSTRAINT_VIOLATION = "ConstraintViolationError"  # code depends on a size that was marked as dynamic
CPP_COMPILE_ERROR = "CppCompileError"  # Inductor's: a call of the C++ compiler that failed
SOURCE_SUFFIXES = (".cpp", ".h", ".hpp", ".o")


class CompilerFailure(NamedTuple):
    """A call of the C++ compiler that failed."""

    source: str  # the file that it compiled; the whole command if that names no file
    output: str  # of the compiler, stdout and stderr
    status: int | None = None  # exit status, negative for a signal; None if torch does not pass it on


@internal(
    "compile errors", "torch._dynamo.exc.TorchDynamoException",
    "errors of torch.compile may be shown as tracebacks without a hint, and errors of g++ without its message",
)  # fmt: skip
def supported() -> bool:
    base, unsupported = find("torch._dynamo.exc:TorchDynamoException"), find(f"torch._dynamo.exc:{UNSUPPORTED}")
    cpp_compile_error = find(f"torch._inductor.exc:{CPP_COMPILE_ERROR}")
    recompile_limit = find(f"torch._dynamo.exc:{RECOMPILE_LIMIT}")
    errors = (base, unsupported, cpp_compile_error)
    are_errors = all(isinstance(error, type) and issubclass(error, RuntimeError) for error in errors)
    return are_errors and recompile_limit is not None and has_parameters(cpp_compile_error, "cmd", "output")


def is_compile_error(error: BaseException, name: str = "") -> bool:
    """Whether Dynamo, AOTAutograd, Inductor or the code for symbolic sizes raised it, by a class `name` if given."""
    classes = type(error).__mro__
    is_private = any(cls.__module__.startswith(PRIVATE_MODULES) for cls in classes)
    return is_private and (not name or any(cls.__name__ == name for cls in classes))


def find_compiler_failure(error: BaseException) -> CompilerFailure | None:
    """The failed call of the C++ compiler that caused an error of torch.compile."""
    for cause in causes(error):
        command, output = getattr(cause, "cmd", None), getattr(cause, "output", None)
        if type(cause).__name__ == CPP_COMPILE_ERROR and isinstance(command, list) and isinstance(output, str):
            sources = [word for word in command[1:] if word.endswith(SOURCE_SUFFIXES)]
            status = getattr(cause.__cause__, "returncode", None)
            return CompilerFailure(sources[0] if sources else " ".join(command), output, status)
    return None


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and the chain of its causes. torch stores a backend's error in the attribute `inner_exception`."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
