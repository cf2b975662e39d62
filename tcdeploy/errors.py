"""The errors that tcdeploy raises deliberately, and their exit codes.

`message` says what is wrong, with the value; `hint` gives the next command. Errors of other libraries and of the
operating system are translated at the call that raises them. The CLI catches this tree in one place.

    TcdeployError                 1   failure
    |- UsageError                 2   the request is invalid
    |   `- RecipeError                an unreadable recipe, or an unknown key
    |- ModelError                 1   the model cannot be loaded
    |   |- UnknownModelError      2   there is no model of this name
    |   `- UnsupportedModelError      a kind of model or checkpoint that is not supported
    |       `- UnsupportedArchitectureError   no checkpoint of the model can be served
    |- CompileError               1   a region has a graph break, or its output fails the parity check
    |- RecompileError             1   a program would have been compiled after warm-up
    |- EngineDeadError            1   the engine has failed or was stopped, and gives no more tokens
    |- MismatchError              3   a cache or bundle was made for another environment
    |- TrustError                 4   a signature is missing or not trusted
    |- IntegrityError             5   content does not match its recorded digest
    |- ThresholdError             6   a required limit, such as a time budget, is exceeded
    |- SpaceError                 7   not enough disk space, host memory or GPU memory
    |   `- MemoryShortage             the plan needs more memory than the machine has
    |- NetworkError               8   a remote cannot be reached
    |- OutputError                1   stdout is closed or cannot be written
    |   `- BrokenPipe             141   stdout is a broken pipe; no message is printed
    `- Interrupted              130   the user pressed Ctrl-C
"""

from __future__ import annotations

ARCHITECTURE_HINT = (
    "causal LMs whose layers all attend through transformers' AttentionInterface can be served; "
    "TCDEPLOY_DEBUG=1 shows the traceback"
)


class TcdeployError(Exception):
    """`message` says what is wrong; `hint` gives the next command, or is empty."""

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


class UnknownModelError(ModelError):
    exit_code = 2  # as for an unknown recipe


class UnsupportedModelError(ModelError):
    pass


class UnsupportedArchitectureError(UnsupportedModelError):
    def __init__(self, message: str, hint: str = ARCHITECTURE_HINT) -> None:
        super().__init__(message, hint)


class CompileError(TcdeployError):
    pass


class RecompileError(TcdeployError):
    pass


class EngineDeadError(TcdeployError):
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


class MemoryShortage(SpaceError):
    """`needed_bytes`, `available_bytes`: total memory of the GPU, or of the host for a plan on the CPU."""

    def __init__(self, message: str, hint: str, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message, hint)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class NetworkError(TcdeployError):
    exit_code = 8


class OutputError(TcdeployError):
    pass


class BrokenPipe(OutputError):
    exit_code = 141  # 128 + SIGPIPE


class Interrupted(TcdeployError):
    exit_code = 130
