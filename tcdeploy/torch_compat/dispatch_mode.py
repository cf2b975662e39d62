"""Observe each operation that torch runs, with its inputs and its result.

`TorchDispatchMode` is the documented way to do so, but is defined in a private module. Without it, the probe cannot
check where a model's token positions come from (models/positions.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tcdeploy.torch_compat.internal import Internal, find

DISPATCH_MODE = "torch.utils._python_dispatch:TorchDispatchMode"


def supported() -> bool:
    return find(f"{DISPATCH_MODE}.__torch_dispatch__") is not None


INTERNAL = Internal(
    "position check",
    "torch",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "models that compute token positions of their own are not refused",
    supported,
)


@contextlib.contextmanager
def observe_operations(observer: Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]) -> Iterator[None]:
    """Within the block, call observer(name, args, kwargs, result) after each operation.

    `name` is that of the operation without its namespace and overload: "cumsum", or "add_" for its in-place form.
    """
    if not supported():
        yield
        return
    names: dict[Any, str] = {}

    def __torch_dispatch__(_: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = names.get(func)
        if name is None:
            name = names[func] = func.overloadpacket.__name__
        observer(name, args, kwargs, result)
        return result

    mode = type("ObservingMode", (find(DISPATCH_MODE),), {"__torch_dispatch__": __torch_dispatch__})
    with mode():
        yield
