"""Cuts the graph of a model's forward at its layers, which are calls of the operator `tcdeploy_export::layer`.

Part i holds the nodes that run after layer i - 1 and before layer i; the last part holds those after all layers. A node
belongs to the earliest part in which all of its inputs are available. Sizes (SymInt) belong to no part: each part that
uses one computes it again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

_library = torch.library.Library("tcdeploy_export", "DEF")
_library.define("layer(Tensor hidden, Tensor[] inputs, Tensor? rows, int index, str dtype) -> Tensor")
layer_operator = torch.ops.tcdeploy_export.layer.default


@torch.library.register_fake("tcdeploy_export::layer", lib=_library)
def _(hidden: Tensor, inputs: list[Tensor], rows: Tensor | None, index: int, dtype: str) -> Tensor:
    """`dtype`: of the result; "" for that of `hidden`."""
    like = hidden if rows is None else hidden[:, rows]
    return torch.empty_like(like, dtype=getattr(torch, dtype) if dtype else None)


@dataclass
class GraphPart:
    """`outputs`: tensors that are read outside of the part. `layer_call`: the layer that follows, if any."""

    nodes: list[Node] = field(default_factory=list)
    outputs: list[Node] = field(default_factory=list)
    layer_call: Node | None = None

    def inputs(self) -> list[Node]:
        """The tensors of other parts that it reads, each once."""
        own = set(self.nodes)
        return list(dict.fromkeys(node for reader in self.nodes for node in tensors_read(reader) if node not in own))

    def as_module(self) -> GraphModule:
        """A module from the inputs to a tuple of the outputs."""
        graph, copies = Graph(), dict[Node, Node]()
        for number, node in enumerate(self.inputs()):
            copies[node] = graph.placeholder(f"input_{number}")

        def copy(node: Node) -> Node:
            if node not in copies:
                for argument in node.all_input_nodes:  # sizes of tensors
                    copy(argument)
                copies[node] = graph.node_copy(node, copies.__getitem__)
            return copies[node]

        for node in self.nodes:
            copy(node)
        # Programs take contiguous values, as `export.py` shows them to torch.export.
        outputs = [graph.call_function(torch.ops.aten.contiguous.default, (copies[node],)) for node in self.outputs]
        graph.output(tuple(outputs))
        return GraphModule(nn.Module(), graph)


def cut_at_layers(graph: Graph, num_layers: int) -> list[GraphPart]:
    """The num_layers + 1 parts. NotImplementedError: a layer reads the output of a later layer or is called twice."""
    parts = [GraphPart() for _ in range(num_layers + 1)]
    part_of: dict[Node, int] = {}
    for node in graph.nodes:
        part = max((part_of[argument] for argument in node.all_input_nodes), default=0)
        is_layer = node.target is layer_operator
        if is_layer:
            index: Any = node.args[3]
            if part > index or parts[index].layer_call is not None:
                raise NotImplementedError(f"layer {index} reads the output of a later layer, or is called twice")
            parts[index].layer_call, part = node, index + 1
        elif node.op != "placeholder" and is_tensor(node):
            parts[part].nodes.append(node)
        part_of[node] = part
        leaves_part = is_layer or node.op == "output"
        for argument in tensors_read(node):
            owner = parts[part_of[argument]]
            is_outside = leaves_part or part_of[argument] != part
            if is_outside and argument in owner.nodes and argument not in owner.outputs:
                owner.outputs.append(argument)
    return parts


def tensors_read(node: Node) -> Iterator[Node]:
    """The tensors that a node reads, also those of which it reads only a size."""
    for argument in node.all_input_nodes:
        if is_tensor(argument):
            yield argument
        else:
            yield from tensors_read(argument)


def is_tensor(node: Node) -> bool:
    """False for sizes, and for torch.export's checks of metadata, which have no value."""
    return isinstance(node.meta.get("val"), Tensor)
