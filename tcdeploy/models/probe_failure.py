"""Translates an exception of a model's code on fake tensors to the reason for which the model is refused.

Modelling code fails for few reasons: it requires an input that a text request does not have, it reads values of
tensors, its attention is not transformers' AttentionInterface, or a package is missing. These are recognised by the
exception, by the frame that raised it and by the arguments of that frame. For any other exception, the error names the
step that failed and the line of source.
"""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from tcdeploy.errors import ModelError, TcdeployError, UnsupportedArchitectureError, UnsupportedModelError
from tcdeploy.models.load_errors import exception_chain, first_line, missing_package_error, missing_packages

VALUE_ERROR, SIZE_ERROR = "DataDependentOutputException", "DynamicOutputShapeException"  # of torch's fake tensors
EXPLAIN_HINT = "tcdeploy explain MODEL shows the line and its cure"
CONFIG_HINT = "check config.json; TCDEPLOY_DEBUG=1 shows the traceback"
UNTRACEABLE = "cannot be run on fake tensors, so it cannot be traced: its forward pass"
MISSING_ARGUMENTS = re.compile(r"forward\(\) missing \d+ required positional arguments?: (.+)")
MASK = "'attention_mask'"
INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the name of transformers' AttentionInterface in its modelling modules


class UnexplainedFailureError(UnsupportedArchitectureError):
    """A failure of which only the exception's text is known. It may be a consequence of another reason."""


@contextlib.contextmanager
def explaining_failures(
    name: str, implementation: str, model: nn.Module | None = None, has_slots: bool = False
) -> Iterator[None]:
    """Raise ModelError with the reason if the block raises another exception.

    The block runs the forward pass of `model`, or builds the model if that is None. `implementation`: the name under
    which the model is to look up its attention function. has_slots: whether it keeps state in slots, and so may have no
    attention.
    """
    try:
        yield
    except TcdeployError:
        raise
    except Exception as error:
        raise _explain(name, implementation, model, error, has_slots) from error


def _explain(name: str, implementation: str, model: nn.Module | None, error: Exception, has_slots: bool) -> ModelError:
    if isinstance(error, KeyError) and implementation in str(error):
        return UnsupportedArchitectureError(f"{name} does not look its attention up in the AttentionInterface")
    if packages := missing_packages(list(exception_chain(error))):
        return missing_package_error(name, packages)
    untraceable = {
        VALUE_ERROR: "reads values of tensors on the host",
        SIZE_ERROR: "has tensors whose size depends on values of other tensors",
    }
    if problem := untraceable.get(type(error).__name__):
        return UnsupportedModelError(f"{name} {UNTRACEABLE} {problem} ({first_line(error)})", EXPLAIN_HINT)
    if model is None:
        message = f"{name} cannot be built from its config.json: {describe_exception(error)}"
        return UnexplainedFailureError(message, CONFIG_HINT)
    inputs = missing_inputs(error)
    if inputs and inputs != [MASK]:
        return UnsupportedArchitectureError(f"{name} requires inputs other than text: {', '.join(inputs)}")
    sources = {sys.modules.get(type(module).__module__) for module in model.modules()}
    if not has_slots and not any(hasattr(source, INTERFACE) for source in sources):
        return UnsupportedArchitectureError(f"{name} never calls transformers' AttentionInterface")
    if inputs:
        return UnexplainedFailureError(f"{name} requires an attention mask, and packed prompts have none")
    return UnexplainedFailureError(f"{name} cannot be run on fake tensors: {describe_exception(error)}")


def missing_inputs(error: Exception) -> list[str]:
    """Arguments that a forward pass requires, in quotes, and that packed text does not have; [] if they are not known.

    Either Python names them, or they are None in the frame that raised the exception, which names them in its message
    or, if None was used like a tensor, in its line of source.
    """
    if arguments := MISSING_ARGUMENTS.search(str(error)):
        return [arguments[1]]
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if _is_modelling(frame.f_code.co_filename)]
    if not frames:
        return []
    is_none_used = isinstance(error, AttributeError | TypeError) and "NoneType" in str(error)
    text = (_modelling_lines(error)[-1].line or "") if is_none_used else str(error)
    words = {word.lower() for word in re.findall(r"\w+", text)}
    code, values = frames[-1].f_code, frames[-1].f_locals
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [f"'{name}'" for name in names if values.get(name, "") is None and name.lower() in words]


def describe_exception(error: Exception) -> str:
    """The exception's type and text, and the line of the model's source that raised it."""
    lines = _modelling_lines(error)
    place = f" ({Path(lines[-1].filename).name}, line {lines[-1].lineno})" if lines else ""
    return f"{type(error).__name__}: {first_line(error)[:200]}{place}"


def _modelling_lines(error: Exception) -> list[traceback.FrameSummary]:
    return [line for line in traceback.extract_tb(error.__traceback__) if _is_modelling(line.filename)]


def _is_modelling(filename: str) -> bool:
    """Whether a file has the code of a model, in transformers or from a repository."""
    path = Path(filename)
    return path.name.startswith(("modeling_", "modular_")) and path.name != "modeling_utils.py"
