"""Import Dynamo and Inductor early: 3 s that belong to the import stage, not to the first bucket.

torch imports both when it first compiles. Without the modules' current names, that import is timed as part of the first
bucket.
"""

from __future__ import annotations

from tcdeploy.torch_compat.internal import Internal, find

MODULES = ("torch._dynamo", "torch._inductor.compile_fx")


def supported() -> bool:
    return all(find(module) is not None for module in MODULES)


INTERNAL = Internal(
    "compiler imports",
    "torch",
    "torch._inductor.compile_fx",
    "importing the compiler counts as compile time of the first bucket",
    supported,
)


def import_compile_stack() -> None:
    supported()
