"""All private names that this package depends on, and which of them the installed versions lack.

Adding one: write its file, add the module to the tuple, and add the removal of the name to
tests/torch_compat/test_missing_internals.py, which starts a model without it.
"""

from __future__ import annotations

import importlib.metadata
from typing import NamedTuple

from tcdeploy.torch_compat import torch_flash
from tcdeploy.torch_compat.dynamo import (
    body_forward,
    compile_counters,
    compile_errors,
    compile_refusal,
    compile_threads,
    compile_trace,
    compiled_call,
    dispatch_mode,
    eager_input_vals,
    fake_tensors,
    mark_dynamic,
)
from tcdeploy.torch_compat.inductor import (
    aot_package,
    aot_pdl,
    autotune_cache,
    benchmarker,
    compiler_queries,
    custom_graph_pass,
    graph_cache_keys,
    installation_hashes,
    kernel_environment,
    pdl,
    precompiled_headers,
)
from tcdeploy.torch_compat.inductor import settings as inductor_settings
from tcdeploy.torch_compat.internal import Internal
from tcdeploy.torch_compat.transformers import fast_import as transformers_import
from tcdeploy.torch_compat.transformers import float32_tensors
from tcdeploy.torch_compat.triton import cache as triton_cache
from tcdeploy.torch_compat.triton import platform_key as triton_platform_key
from tcdeploy.torch_compat.triton import source as triton_source
from tcdeploy.torch_compat.triton import stored_kernels
from tcdeploy.torch_compat.uvicorn import protocol as uvicorn_protocol

INTERNALS: tuple[Internal, ...] = tuple(
    module.INTERNAL
    for module in (
        aot_package, aot_pdl, autotune_cache, benchmarker, body_forward, compile_counters, compile_errors,
        compile_refusal, compile_threads, compile_trace, compiled_call, compiler_queries, custom_graph_pass,
        dispatch_mode, eager_input_vals, fake_tensors, float32_tensors, graph_cache_keys, inductor_settings,
        installation_hashes, kernel_environment, mark_dynamic, pdl, precompiled_headers, stored_kernels, torch_flash,
        transformers_import, triton_cache, triton_platform_key, triton_source, uvicorn_protocol,
    )
)  # fmt: skip


class MissingInternal(NamedTuple):
    name: str  # of the Internal
    consequence: str  # what is lost, and the version that moved the name


def missing_internals() -> tuple[MissingInternal, ...]:
    """Those that are not supported. Names of packages that are not installed are not missing."""
    return tuple(
        MissingInternal(internal.name, f"{internal.consequence}: {_version(internal.package)} moved {internal.symbol}")
        for internal in INTERNALS
        if not internal.supported()
    )


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"this {package}"
