"""The switches of torch that decide what Inductor makes, as text: they are part of torch's cache key.

Most are of torch._inductor.config, which environment variables reach too; a variable that is set where a cache is made
and not where it serves makes every start a miss, and torch names no reason. What torch's own key leaves out is left out
(`_cache_config_ignore_prefix`, the one internal here; torch 2.11 to 2.13).
"""

from __future__ import annotations

import torch
import torch._inductor.config as inductor

MATMUL_SETTINGS = ("fp32_precision", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
CACHE_SETTINGS = ("fx_graph_cache", "force_disable_caches")  # torch's key leaves them out, and nothing is found without


def torch_settings() -> dict[str, str]:
    """Name -> value. Equal for two processes whose programs of the same graph have the same key."""
    left_out = tuple(inductor._cache_config_ignore_prefix)
    portable = inductor.save_config_portable(ignore_private_configs=False)
    found = {name: repr(value) for name, value in portable.items() if not name.startswith(left_out)}
    found |= {name: repr(getattr(inductor, name)) for name in CACHE_SETTINGS}
    matmul = torch.backends.cuda.matmul
    return found | {
        "cache_key_tag": repr(torch.compiler.config.cache_key_tag),
        "deterministic": repr(torch.are_deterministic_algorithms_enabled()),
        "default_dtype": repr(torch.get_default_dtype()),
        "matmul": repr(tuple(getattr(matmul, name) for name in MATMUL_SETTINGS)),
    }
