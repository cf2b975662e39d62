"""FX pass on exported programs: replace ops of transformers, so that packages run without transformers.

In transformers 5.17 to 5.23 the experts of a mixture call torch's grouped GEMM, an ATen op that packages may call.
While torch.export traces, they call `transformers::grouped_mm_fallback` instead if the dtype is not bfloat16, or if the
GPU's compute capability is below 8.0. That op exists only in a process that has imported transformers.

The pass runs on the exported graph and not after Inductor's passes, because the names of programs hash that graph, and
because `foreign_ops` then finds every op that a package cannot call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from tcdeploy.kernels.custom_op import NAMESPACE
from tcdeploy.kernels.linear.ops import grouped_mm

FALLBACK, FALLBACK_ARGUMENTS = "transformers::grouped_mm_fallback", ("input", "weight", "offs")
# Namespaces of the ops that `import torch` registers, and ours.
AVAILABLE_NAMESPACES = {"aten", "prim", "prims", "higher_order", "mkldnn", "quantized", NAMESPACE}


def replace_grouped_mm(exported: ExportedProgram) -> None:
    """Replace each call of transformers' op by `tcdeploy::grouped_mm`, whose arguments have the same order."""
    for module in graph_modules(exported):
        calls = [node for node in module.graph.nodes if op_name(node) == FALLBACK]
        for node in calls:
            node.args = (*node.args, *(node.kwargs[name] for name in FALLBACK_ARGUMENTS[len(node.args) :]))
            node.kwargs = {}
            node.target = grouped_mm.overload
        if calls:
            module.recompile()


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
