"""Compile a function with the post-grad pass, check its result, and count the ops in its graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._inductor.config as inductor_config
import torch._inductor.utils
from torch import Tensor
from torch._inductor import compile_fx
from torch._inductor.virtualized import V
from torch.fx import GraphModule

from tcdeploy.programs.passes.post_grad import PostGradPass
from tcdeploy.programs.roles import Role, compiling
from tests.conftest import reset_programs


class CountingPass(PostGradPass):
    counts: Counter[object]

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        self.counts = Counter(node.target for node in graph.nodes)


def without_codegen(module: GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
    """A backend that runs Inductor up to and including the post-grad passes, then the rewritten graph in eager mode.

    It takes an eighth of the time of a full compilation. At least one case of each fusion is compiled in full.
    """

    def run_passes(
        graph_module: GraphModule, example_inputs: Sequence[Tensor], *, is_inference: bool, **_: Any
    ) -> Callable[..., Any]:
        compile_fx.view_to_reshape(graph_module)
        with V.set_fake_mode(compile_fx.fake_tensor_prop(graph_module, example_inputs)):
            compile_fx._recursive_post_grad_passes(graph_module, is_inference)
        return graph_module

    return compile_fx.compile_fx(module, inputs, inner_compile=run_passes)


def compile_and_run(
    function: Callable[..., Tensor], *args: Tensor, post_grad_pass: PostGradPass, codegen: bool = True,
    rows: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The result of the function compiled with this pass, without a cache. Tensors that are no arguments are weights.

    `rows`: the argument that holds the rows to return.
    """
    reset_programs()
    patched = inductor_config.patch(post_grad_custom_pre_pass=post_grad_pass)
    compile_graph = torch._inductor.compile if codegen else without_codegen

    def compile_with_roles(module: GraphModule, inputs: Sequence[Any]) -> Any:
        arguments = {id(arg): Role.ROWS if arg is rows else Role.VALUE for arg in args}
        with compiling([arguments.get(id(item), Role.WEIGHT) for item in inputs], inputs):
            return compile_graph(module, inputs)

    with torch.no_grad(), torch._inductor.utils.fresh_cache(), patched:
        return torch.compile(function, fullgraph=True, dynamic=False, backend=compile_with_roles)(*args)


def count_targets(
    function: Callable[[Tensor], Tensor], x: Tensor, *, codegen: bool = True, **flags: bool
) -> Counter[object]:
    """Ops in the compiled graph of `function`. Its result and dtype must match eager mode, and x must not change."""
    counting_pass, x_before = CountingPass(**flags), x.clone()
    compiled = compile_and_run(function, x, post_grad_pass=counting_pass, codegen=codegen)
    assert torch.equal(x, x_before), "the program wrote to its input"
    with torch.no_grad():
        torch.testing.assert_close(compiled, function(x), rtol=5e-2, atol=0.2)  # bfloat16, rounded less often
    return counting_pass.counts
