"""Registers the `tcdeploy::` ops with torch, without importing its compiler.

`torch.library.custom_op` would do the same, but an op that it registers imports torch._dynamo when it is first called.
That takes 1 to 2 s, and a start from ahead-of-time packages needs no compiler. The schema is inferred in the same way
and has the same tag. The ops have no derivatives, and inference needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

NAMESPACE = "tcdeploy"
# Enumerations of torch. A package of torch 2.11 passes the number that torch.export assigns to such a value, and the op
# reads that number as another value: quint8 for bfloat16.
ENUMERATIONS = ("ScalarType", "Layout", "MemoryFormat")  # as schemas name them
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # the ops exist as long as this object
implementations: dict[str, Callable[..., Any]] = {}  # of all ops, by name, for builds that call them on fake tensors


class CustomOp:
    """An op that torch.compile and torch.export treat as opaque. Call it like its function."""

    def __init__(self, name: str, schema: str, function: Callable[..., Any]) -> None:
        _library.define(name + schema, tags=[torch.Tag.pt2_compliant_tag])
        _library.impl(name, function, "CompositeExplicitAutograd")
        implementations[name] = function
        self._name = name
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default  # a torch._ops.OpOverload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.overload(*args, **kwargs)

    def register_fake(self, function: FunctionT) -> FunctionT:
        """Decorates the function that returns an empty result of the right shape and dtype, for tracing."""
        torch.library.register_fake(f"{NAMESPACE}::{self._name}", function, lib=_library)
        return function


def custom_op(name: str, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], CustomOp]:
    """Decorates the implementation of a new op `tcdeploy::NAME` for all devices.

    The function's type hints give the schema. `mutates_args`: the arguments that it writes to. Raises TypeError for
    arguments that packages do not pass correctly (ENUMERATIONS): pass a name instead, such as "bfloat16".
    """

    def register(function: Callable[..., Any]) -> CustomOp:
        schema = torch.library.infer_schema(function, mutates_args=mutates_args)
        if found := [kind for kind in ENUMERATIONS if kind in schema]:
            raise TypeError(f"tcdeploy::{name} takes a {found[0]}: {schema}; pass its name as a str")
        return CustomOp(name, schema, function)

    return register
