"""Change the inputs of an opaque op in an FX graph, with the layouts that Inductor gives them.

Inductor lays out an opaque op's inputs as they were traced. It takes those layouts from node.meta["eager_input_vals"],
not from the input nodes, so a pass that replaces inputs (programs/passes/rotary.py) must replace these values as well.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from tcdeploy.torch_compat.internal import find, find_code, internal, mentions

KEY = "eager_input_vals"


@internal("rotary fusion", 'torch.fx.Node.meta["eager_input_vals"]', "RoPE is not fused into decode attention")
def supported() -> bool:
    """Whether tracing records the values, and Inductor's lowering reads them."""
    return mentions(find("torch.fx.experimental.proxy_tensor:PythonKeyTracer"), KEY) and mentions(
        find_code("torch._inductor.graph:GraphLowering"), KEY
    )


def replace_inputs(node: Node, inputs: dict[str, Any]) -> None:
    """Replace keyword inputs of `node` by constants, or by nodes that have meta["val"]."""
    node.kwargs = {**node.kwargs, **inputs}
    traced = node.meta.get(KEY)
    if traced is not None:
        values = {name: map_arg(source, lambda arg: arg.meta["val"]) for name, source in inputs.items()}
        node.meta[KEY] = (traced[0], {**traced[1], **values})
