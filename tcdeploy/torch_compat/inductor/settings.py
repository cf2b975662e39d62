"""The torch settings that are part of Inductor's cache key, as text.

Most are in torch._inductor.config, which environment variables set too. If a variable is set when the cache is filled
but not when it serves, every start is a miss, and torch reports no reason. Manifests record the settings, so `cache
why` reports it. Settings that torch leaves out of its key (`_cache_config_ignore_prefix`) are left out here.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping

import torch

from tcdeploy.torch_compat.internal import find, internal

CONFIG = "torch._inductor.config"
MATMUL_SETTINGS = ("fp32_precision", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
CACHE_SETTINGS = ("fx_graph_cache", "force_disable_caches")  # not in torch's key, but nothing is found without them
# Settings with which torch stores no program in its cache folder: (setting, value, variables that set it).
DISABLING_SETTINGS = (
    (
        "torch.compiler.config:force_disable_caches", True,
        ("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "TORCH_COMPILE_FORCE_DISABLE_CACHES"),
    ),
    (
        f"{CONFIG}:fx_graph_cache", False,
        ("TORCHINDUCTOR_FX_GRAPH_CACHE", "TORCHINDUCTOR_FX_GRAPH_CACHE_DEFAULT"),
    ),
    ("torch._dynamo.config:disable", True, ("TORCH_COMPILE_DISABLE",)),
    ("torch._dynamo.config:caching_precompile", True, ("TORCH_CACHING_PRECOMPILE",)),
)  # fmt: skip
DYNAMO_DISABLE = "TORCHDYNAMO_DISABLE"  # read by each call of torch.compile, which then returns the function itself
# Read by torch._inductor.cpp_builder itself. They change flags of the C++ compiler, and so the names of its outputs.
CPP_VARIABLES = ("TORCHINDUCTOR_DEBUG_COMPILE", "TORCHINDUCTOR_DEBUG_SYMBOL")


@internal("cache settings", "torch._inductor.config._cache_config_ignore_prefix",
          "`cache why` may name settings that do not affect the cache, or miss one that does")  # fmt: skip
def supported() -> bool:
    return isinstance(find(f"{CONFIG}:_cache_config_ignore_prefix"), list | tuple) and callable(
        find(f"{CONFIG}:save_config_portable")
    )


def torch_settings() -> dict[str, str]:
    """Name -> value. Equal for two processes whose programs of the same graph have the same key."""
    matmul = torch.backends.cuda.matmul
    return _inductor_settings() | {
        "cache_key_tag": repr(torch.compiler.config.cache_key_tag),
        "deterministic": repr(torch.are_deterministic_algorithms_enabled()),
        "default_dtype": repr(torch.get_default_dtype()),
        "matmul": repr(tuple(getattr(matmul, name, None) for name in MATMUL_SETTINGS)),
        **{name: os.environ[name] for name in CPP_VARIABLES if os.environ.get(name, "0") != "0"},
    }


def disabling_settings() -> list[str]:
    """Each setting that keeps torch from storing programs, as `NAME=VALUE` of its variable if that is set."""
    disabling = [f"{DYNAMO_DISABLE}=1"] if os.environ.get(DYNAMO_DISABLE) == "1" else []
    for setting, value, variables in DISABLING_SETTINGS:
        if find(setting) is value:
            assigned = [f"{name}={os.environ[name]}" for name in variables if os.environ.get(name)]
            disabling.append(next(iter(assigned), f"{setting.replace(':', '.')}={value}"))
    return disabling


def settings_digest(settings: Mapping[str, str]) -> str:
    """The digest of those settings that change programs or names of files. It is part of the environment's key."""
    factors = {name: value for name, value in settings.items() if name not in CACHE_SETTINGS}
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:16]


def _inductor_settings() -> dict[str, str]:
    config, save = find(CONFIG), find(f"{CONFIG}:save_config_portable")
    if config is None or save is None:
        return {}
    ignored = tuple(getattr(config, "_cache_config_ignore_prefix", ()))
    portable = save(ignore_private_configs=False)
    settings = {name: repr(value) for name, value in portable.items() if not name.startswith(ignored)}
    return settings | {name: repr(getattr(config, name, None)) for name in CACHE_SETTINGS}
