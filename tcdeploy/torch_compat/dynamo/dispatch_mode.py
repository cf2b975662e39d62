"""Observe or replace each operation that torch runs, with its inputs and its result.

`TorchDispatchMode` is the documented way to do so, but is defined in a private module. models/positions.py and
engine/check/precise_math.py use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tcdeploy.torch_compat.internal import find, internal

DISPATCH_MODE = "torch.utils._python_dispatch:TorchDispatchMode"
# Called with an operation (torch.ops.aten.mm.default), its positional and its keyword arguments; returns the result.
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@internal(
    "operation dispatch", "torch.utils._python_dispatch.TorchDispatchMode",
    "models that compute token positions of their own are not refused, and the parity check has fixed tolerances",
)  # fmt: skip
def supported() -> bool:
    return find(f"{DISPATCH_MODE}.__torch_dispatch__") is not None


def handle_operations(handler: Handler) -> contextlib.AbstractContextManager[Any]:
    """Within the block, `handler` runs instead of each operation. It may call the operation itself."""

    def __torch_dispatch__(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return handler(func, args, kwargs or {})

    base: Any = find(DISPATCH_MODE)
    mode: contextlib.AbstractContextManager[Any] = type(
        "HandlerMode", (base,), {"__torch_dispatch__": __torch_dispatch__}
    )()
    return mode


def is_in_place(func: Any) -> bool:
    """Whether an operation writes its result into its first argument, as aten.add_ does."""
    return str(func.overloadpacket.__name__).endswith("_")


@contextlib.contextmanager
def observe_operations(observer: Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]) -> Iterator[None]:
    """Within the block, call observer(name, args, kwargs, result) after each operation.

    `name` is that of the operation without its namespace and overload: "cumsum", or "add_" for its in-place form.
    """
    if not supported():
        yield
        return
    names: dict[Any, str] = {}

    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        name = names.get(func)
        if name is None:
            name = names[func] = func.overloadpacket.__name__
        observer(name, args, kwargs, result)
        return result

    with handle_operations(handler):
        yield
