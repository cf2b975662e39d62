"""Ray's prefix-aware request router, under a name that does not need the engines of Ray Serve LLM.

The public name, `ray.serve.llm.request_router.PrefixCacheAffinityRouter`, can be imported only if vLLM or SGLang is
installed. This file holds the only use of the private name (Ray 2.60).

A model selects the router in its entry of the config:

    request_router_config: {request_router_class: tcdeploy.scale.prefix_router.PrefixRouter}
"""

from __future__ import annotations

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter


class PrefixRouter(PrefixCacheAffinityRouter):
    """Prefers the replica with the longest matching prefix, unless queue lengths differ by more than a threshold.

    The threshold is `imbalanced_threshold`. `request_router_kwargs` are described in Ray's documentation of
    PrefixCacheAffinityRouter.
    """
