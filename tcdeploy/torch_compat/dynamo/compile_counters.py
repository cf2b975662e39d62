"""Read the counters of Dynamo and Inductor: programs, cache hits and misses, graph breaks.

torch has no public API that says whether a compilation came from the cache.
"""

from __future__ import annotations

import functools

from tcdeploy.torch_compat.internal import find, internal, is_imported, mentions

DYNAMO = "torch._dynamo"
COUNTERS = "torch._dynamo.utils:counters"
HIT, MISS, BYPASS = "fxgraph_cache_hit", "fxgraph_cache_miss", "fxgraph_cache_bypass"
WRITE_ERROR, CUDAGRAPH_SKIPS = "fxgraph_cache_write_error", "cudagraph_skips"


@internal("compile counters", "torch._dynamo.utils.counters",
          "cache hits cannot be counted, so every bucket's outcome is unknown and --require-hit fails")  # fmt: skip
@functools.cache
def supported() -> bool:
    """Whether torch still counts under the names that are read here."""
    return (
        isinstance(find(COUNTERS), dict)
        and mentions(find("torch._inductor.codecache:FxGraphCache"), HIT, MISS, BYPASS)
        and mentions(find("torch._dynamo.output_graph:OutputGraph"), "unique_graphs")
    )


def is_compiler_imported() -> bool:
    """Whether this process has imported torch's compiler. If not, it has compiled nothing."""
    return is_imported(DYNAMO)


def can_count() -> bool:
    """Whether `read_counters` is right: torch counts as expected, or its compiler is not imported."""
    return not is_compiler_imported() or supported()


def read_counters() -> dict[str, int]:
    """Totals of this process, by field of `CompileCounts` (programs/compile_stats.py).

    Empty if the counters are missing, or if torch's compiler is not imported.
    """
    if not is_compiler_imported() or not supported():
        return {}
    counters = find(COUNTERS)
    graphs, inductor = counters["stats"]["unique_graphs"], counters["inductor"]
    return {
        "compiles": graphs,
        "programs": graphs,
        "cache_hits": inductor[HIT],
        "cache_misses": inductor[MISS],
        "cache_bypasses": inductor[BYPASS],
        "cache_write_errors": inductor[WRITE_ERROR],
        "cudagraph_skips": inductor[CUDAGRAPH_SKIPS],
        "graph_breaks": sum(counters["graph_break"].values()),
    }
