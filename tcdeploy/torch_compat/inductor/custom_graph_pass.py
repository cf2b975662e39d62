"""Run our FX passes inside Inductor, with the graph cache still on.

Inductor takes a pass as an option, post_grad_custom_pre_pass, and caches programs that went through it if the pass is a
CustomGraphPass with a uuid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tcdeploy.torch_compat.internal import find, internal

MODULE = "torch._inductor.custom_graph_pass"
OPTION = "post_grad_custom_pre_pass"

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomGraphPass as CustomGraphPass
else:
    CustomGraphPass = find(f"{MODULE}:CustomGraphPass") or object


@internal(
    "graph passes", "torch._inductor.custom_graph_pass.CustomGraphPass",
    "no graph pass runs: projections are not merged and no fused kernel is used, so steps are slower",
)  # fmt: skip
def supported() -> bool:
    return isinstance(find(f"{MODULE}:CustomGraphPass"), type) and hasattr(find("torch._inductor.config"), OPTION)


def import_compiler() -> None:
    """Import Dynamo and Inductor, which torch imports when it first compiles."""
    find("torch._dynamo")
    find("torch._inductor.compile_fx")


def pass_options(graph_pass: Callable[..., Any]) -> dict[str, Any]:
    """The options of torch.compile that make Inductor run `graph_pass`; empty if Inductor cannot."""
    return {OPTION: graph_pass} if supported() else {}
