"""Count Dynamo's compilations, hit or miss, by its start callback.

This is the check that serving compiles nothing. Without the callback the count stays 0; a compilation after warm-up
is still an error, because that is enforced by torch.compiler.set_stance.
"""

from __future__ import annotations

from tcdeploy.torch_compat.internal import Internal, find, is_imported

CALLBACK = "torch._dynamo.callback"

compile_starts = 0  # of this process since the first `listen`


def supported() -> bool:
    listeners = find(f"{CALLBACK}:callback_handler.start_callbacks")
    return callable(find(f"{CALLBACK}:on_compile_start")) and isinstance(listeners, list)


INTERNAL = Internal(
    "compile callback",
    "torch",
    "torch._dynamo.callback.on_compile_start",
    "compilations are not counted, and the compiles counter stays 0",
    supported,
)


def listen() -> None:
    """Register the callback, if torch's compiler is imported.

    torch.compiler.reset() removes it, so call this again before each reading.
    """
    if is_imported(CALLBACK) and supported():
        callback = find(CALLBACK)
        if _count_compile_start not in callback.callback_handler.start_callbacks:
            callback.on_compile_start(_count_compile_start)


def _count_compile_start(args: object) -> None:
    global compile_starts
    compile_starts += 1
