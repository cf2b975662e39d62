"""Every error that tcdeploy raises on purpose, and the exit code that each one means.

An error names the thing, the fact and the next command: `message` says what is wrong, `hint` what to do about it.
Foreign errors (torch, huggingface_hub, the operating system) are translated where they are met, and the CLI catches
this tree once.

    TcdeployError                 1   failure
    |- UsageError                 2   the request itself is wrong
    |   `- RecipeError                a recipe that cannot be read, or a key that nobody knows
    |- ModelError                 1   the model cannot be found or loaded
    |   `- UnsupportedModelError      it loads, but its attention cannot be served
    |- CompileError               1   a region does not trace whole, or its output is not the eager model's
    |- RecompileError             1   something would have compiled after warm-up
    |- MismatchError              3   made for another environment
    |- TrustError                 4   signature missing or unknown
    |- IntegrityError             5   bytes are not what they were
    |- ThresholdError             6   a figure that was demanded is not met
    |- SpaceError                 7   no room: disk, host memory or GPU memory
    |- NetworkError               8   a remote did not answer
    `- Interrupted              130   the user pressed Ctrl-C
"""

from __future__ import annotations


class TcdeployError(Exception):
    """`message` states the fact; `hint` gives the next command (may be empty)."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(TcdeployError):
    exit_code = 2


class RecipeError(UsageError):
    pass


class ModelError(TcdeployError):
    pass


class UnsupportedModelError(ModelError):
    pass


class CompileError(TcdeployError):
    pass


class RecompileError(TcdeployError):
    pass


class MismatchError(TcdeployError):
    exit_code = 3


class TrustError(TcdeployError):
    exit_code = 4


class IntegrityError(TcdeployError):
    exit_code = 5


class ThresholdError(TcdeployError):
    exit_code = 6


class SpaceError(TcdeployError):
    exit_code = 7


class NetworkError(TcdeployError):
    exit_code = 8


class Interrupted(TcdeployError):
    exit_code = 130
