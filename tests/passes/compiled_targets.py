"""Compile a function with the post-grad pass, check its result, and count the ops in its graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
import torch._inductor.config as inductor_config
import torch._inductor.utils
from torch import Tensor

from tcdeploy.passes.post_grad import PostGradPass
from tests.conftest import reset_programs


class CountingPass(PostGradPass):
    counts: Counter[object]

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        self.counts = Counter(node.target for node in graph.nodes)


def count_targets(function: Callable[[Tensor], Tensor], x: Tensor, **flags: bool) -> Counter[object]:
    """Ops in the compiled graph of `function`. Its result and dtype must match eager mode, and x must not change."""
    counting_pass = CountingPass(**flags)
    reset_programs()
    with torch.no_grad(), torch._inductor.utils.fresh_cache():
        with inductor_config.patch(post_grad_custom_pre_pass=counting_pass):
            x_before = x.clone()
            compiled = torch.compile(function, fullgraph=True, dynamic=False)(x)
        assert torch.equal(x, x_before), "the program wrote to its input"
        torch.testing.assert_close(compiled, function(x), rtol=5e-2, atol=0.2)  # bfloat16, rounded less often
    return counting_pass.counts
