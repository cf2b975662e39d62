"""Records the operations that a function runs, on tensors without data, to find out which layers are equal.

torch.export takes about five times as long for a layer, because it makes a graph. Tensors are numbered in the order in
which they appear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tcdeploy.torch_compat.dynamo import dispatch_mode, fake_tensors
from tcdeploy.torch_compat.internal import find, internal

EXPORTING = "torch._export.utils:_compiling_state_context"


@internal("operation traces", "torch._export.utils._compiling_state_context",
          "each layer is exported when packages are compiled, which takes about half a minute longer")  # fmt: skip
def supported() -> bool:
    return callable(find(EXPORTING))


def trace_operations(function: Callable[[list[Tensor]], Tensor], examples: Iterable[Tensor]) -> str | None:
    """The operations of `function` on tensors like `examples`; None if it needs their values.

    Models run the same code as when torch.export traces them.
    """
    if not (supported() and dispatch_mode.supported() and fake_tensors.supported()):
        return None
    tensors: list[Tensor] = []  # kept, because ids of deleted objects are used again
    numbers: dict[int, int] = {}
    lines: list[str] = []

    def text(value: Any) -> str:
        if isinstance(value, Tensor):
            if id(value) not in numbers:
                numbers[id(value)] = len(tensors)
                tensors.append(value)
            return f"%{numbers[id(value)]}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(text, value))}]"
        return repr(value)

    def record(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = operation(*args, **kwargs)
        lines.append(f"{text(result)} = {operation}({text(args)}, {text(list(kwargs.items()))})")
        return result

    try:
        with find(EXPORTING)(), fake_tensors.fake_tensors():
            inputs = [
                torch.empty_strided(example.shape, example.stride(), dtype=example.dtype, device=example.device)
                for example in examples
            ]
            lines.append(text(inputs))
            with dispatch_mode.handle_operations(record):
                result = function(inputs)
            lines.append(text(result))
    except Exception:  # code that needs the values of tensors raises many types
        return None
    return "\n".join(lines)
