"""Finds the ops of an exported program that packages cannot call: those that neither torch nor this package registers.

A start from packages does not import transformers, so it has only the ops of torch and ours. If programs call others,
later starts load the model with transformers, and a warning names the ops.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from tcdeploy.kernels.custom_op import NAMESPACE

# Namespaces of the ops that `import torch` registers, and ours.
AVAILABLE_NAMESPACES = {"aten", "prim", "prims", "higher_order", "mkldnn", "quantized", NAMESPACE}


def foreign_ops(exported: ExportedProgram) -> set[str]:
    """The names of the ops that are neither torch's nor ours, such as "transformers::grouped_mm_fallback"."""
    nodes = [node for module in graph_modules(exported) for node in module.graph.nodes]
    return {op_name(node) for node in nodes if _namespace(node.target) not in {"", *AVAILABLE_NAMESPACES}}


def graph_modules(exported: ExportedProgram) -> Iterator[GraphModule]:
    """The program's graph, and those of its branches and loops."""
    return (module for module in exported.graph_module.modules() if isinstance(module, GraphModule))


def op_name(node: Node) -> str:
    """The name of the op that a node calls, such as "aten::add.Tensor"; "" for other nodes."""
    target: Any = node.target
    return str(target.name()) if _namespace(target) else ""


def _namespace(target: Any) -> str:
    """The part before the colons of an op's name; "" for a Python function, such as those that compute sizes."""
    return getattr(target, "namespace", "")
