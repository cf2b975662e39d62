"""Compile a graph of Dynamo by Inductor, in a backend of our own that sees which tensors are the graph's inputs.

A backend is a documented function of a graph and example inputs. In torch 2.11 to 2.13 the examples are the tensors of
the call themselves, so a backend recognises a parameter by identity. The passes of Inductor run on AOTAutograd's graph,
whose inputs have neither names nor sources. Rejected: the indices of static inputs that Inductor gets. Dynamo marks all
tensors static that it reaches through a module, KV caches and the step's lengths included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule

from tcdeploy.torch_compat.internal import find, has_parameters, internal, mentions

COMPILE = "torch._inductor:compile"
OUTPUT_GRAPH = "torch._dynamo.output_graph:OutputGraph"


@internal(
    "input roles", "torch._inductor.compile",
    "graph passes do not know weights, so one-row products are slower, and the last layer computes all rows",
)  # fmt: skip
def supported() -> bool:
    return has_parameters(find(COMPILE), "gm", "example_inputs", "options") and mentions(
        getattr(find(OUTPUT_GRAPH), "example_inputs", None), "graphargs", "example"
    )


def compile_graph(graph_module: GraphModule, example_inputs: Sequence[Any], options: dict[str, Any] | None) -> Any:
    """The compiled graph, as torch's own backend returns it. `options`: as in torch.compile."""
    return find(COMPILE)(graph_module, example_inputs, options)


def has_subgraphs(graph_module: GraphModule) -> bool:
    """Whether the graph has branches or loops, on whose graphs Inductor's passes run too."""
    return any(isinstance(module, GraphModule) for module in graph_module.modules() if module is not graph_module)
