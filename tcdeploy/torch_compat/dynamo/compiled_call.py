"""Install a compiled call on a module, in the slot that `nn.Module.compile()` fills.

`nn.Module.compile()` takes one set of options, and buckets differ in theirs; torch has no public hook that runs outside
a module's compiled program. nn.Module.__call__ uses `_compiled_call_impl` when it is set, and `_call_impl` otherwise.
Without the slot, programs are compiled from the class's forward. tests/engine/test_tuning.py and
tests/programs/test_programs.py fail when the slot moves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tcdeploy.torch_compat.internal import internal, mentions


@internal("compiled call", "torch.nn.Module._compiled_call_impl",
          "forward is replaced instead, so module hooks run outside the compiled program")  # fmt: skip
def supported() -> bool:
    return (
        "_compiled_call_impl" in vars(nn.Module)
        and callable(getattr(nn.Module, "_call_impl", None))
        and mentions(nn.Module.__call__, "_compiled_call_impl")
    )


_HAS_SLOT = supported()


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Make `module(...)` run `call`; None restores the module's own code. `call` reaches it by `run_uncompiled`."""
    if _HAS_SLOT:
        module._compiled_call_impl = call  # type: ignore[assignment]
    elif call is None:
        vars(module).pop("forward", None)
    else:
        module.forward = call


def get_compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What `set_compiled_call` installed, or None."""
    return module._compiled_call_impl if _HAS_SLOT else vars(module).get("forward")


def _run_call_impl(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module._call_impl(*args, **kwargs)


def _run_class_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


# Runs the module's own code, hooks included if the slot exists. Chosen at import: Dynamo traces through it.
run_uncompiled = _run_call_impl if _HAS_SLOT else _run_class_forward
