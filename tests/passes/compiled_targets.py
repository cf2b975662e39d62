"""What our pass makes of a function: the targets in its graph, and the certainty that it still means the same."""

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
    found: Counter[object]

    def __call__(self, graph: torch.fx.Graph) -> None:
        super().__call__(graph)
        self.found = Counter(node.target for node in graph.nodes)


def count_targets(function: Callable[[Tensor], Tensor], x: Tensor, **asked: bool) -> Counter[object]:
    """What the compiled function is made of; it must say what the function says, in the same dtype."""
    counting = CountingPass(**asked)
    reset_programs()
    with torch.no_grad(), torch._inductor.utils.fresh_cache():
        with inductor_config.patch(post_grad_custom_pre_pass=counting):
            before = x.clone()
            found = torch.compile(function, fullgraph=True, dynamic=False)(x)
        assert torch.equal(x, before), "an input was written to"
        torch.testing.assert_close(found, function(x), rtol=5e-2, atol=0.2)  # bfloat16, rounded less often
    return counting.found
