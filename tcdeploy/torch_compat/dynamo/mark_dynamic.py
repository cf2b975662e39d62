"""Mark a tensor dimension as a symbol, so that programs do not depend on its size.

`torch._dynamo.mark_dynamic` is documented, but is defined in a private module and has no public equivalent up to torch
2.13. Without it, another context or amount of GPU memory compiles again, and a dynamic prefill range becomes one static
bucket (planning/plan.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from torch import Tensor

from tcdeploy.planning.environment import DYNAMIC_SIZES
from tcdeploy.torch_compat.internal import find, has_parameters, internal, is_imported

DYNAMO = "torch._dynamo"
MARK_DYNAMIC = "torch._dynamo:mark_dynamic"
MAYBE_MARK_DYNAMIC = "torch._dynamo:maybe_mark_dynamic"
DIMS_ATTRIBUTE = "tcdeploy_dynamic_dims"  # of a marked tensor; torch's own marks are private


@internal(DYNAMIC_SIZES, "torch._dynamo.mark_dynamic", "programs depend on the context and on the number of KV blocks")
@functools.cache  # `mark_dynamic` is called for each layer of each step that runs without a graph
def supported() -> bool:
    return has_parameters(find(MARK_DYNAMIC), "min", "max")


def mark_dynamic(tensor: Tensor, dim: int, min: int | None = None, max: int | None = None) -> None:
    """Sizes of `dim` between `min` and `max` share a program.

    torch's own mark is left out if its compiler is not imported: then no program is compiled for the tensor.
    """
    setattr(tensor, DIMS_ATTRIBUTE, {**dynamic_dims(tensor), dim: max})
    if is_imported(DYNAMO) and supported():
        find(MARK_DYNAMIC)(tensor, dim, min=min, max=max)


def suggest_dynamic(tensor: Tensor, dim: int) -> None:
    """Like `mark_dynamic`, but code that depends on the size causes a recompilation instead of an error."""
    mark = find(MAYBE_MARK_DYNAMIC)
    if mark is not None:  # otherwise each size has a program of its own
        mark(tensor, dim)


def dynamic_dims(tensor: Tensor) -> dict[int, int | None]:
    """The dimensions of `tensor` that were marked, and the maximum of each; None: no maximum."""
    return dict(sorted(getattr(tensor, DIMS_ATTRIBUTE, {}).items()))


def tensors_in(value: object) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists and dictionaries, such as a module's arguments."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)
