"""All private names that this package depends on, and which of them the installed versions lack.

Adding one: write its file, add the module to MODULES, and add the removal of the name to
tests/torch_compat/test_missing_internals.py, which starts a model without it.
"""

from __future__ import annotations

import importlib
import importlib.metadata

from tcdeploy.torch_compat.internal import Internal

MODULES = (
    "failed_capture", "tensors_without_storage", "torch_flash", "dynamo.body_forward", "dynamo.compile_backend",
    "dynamo.compile_counters",
    "dynamo.compile_errors", "dynamo.compile_refusal", "dynamo.compile_threads", "dynamo.compile_trace",
    "dynamo.compiled_call", "dynamo.dispatch_mode", "dynamo.eager_input_vals", "dynamo.fake_tensors",
    "dynamo.mark_dynamic", "dynamo.operation_trace", "inductor.aot_package", "inductor.aot_pdl",
    "inductor.autotune_cache", "inductor.benchmarker", "inductor.compiler_queries", "inductor.custom_graph_pass",
    "inductor.graph_cache_keys", "inductor.installation_hashes", "inductor.kernel_environment",
    "inductor.package_builds", "inductor.pdl", "inductor.precompiled_headers", "inductor.settings",
    "transformers.attention_setting", "transformers.experts_interface", "transformers.fast_import",
    "transformers.float32_tensors", "transformers.initialization", "triton.cache", "triton.gluon",
    "triton.platform_key", "triton.source", "triton.stored_kernels", "uvicorn.protocol",
)  # fmt: skip
INTERNALS: tuple[Internal, ...] = tuple(
    importlib.import_module(f"tcdeploy.torch_compat.{module}").supported for module in MODULES
)


def missing_internals() -> tuple[tuple[str, str], ...]:
    """The name of each that is not supported, and what is lost, with the version that moved it."""
    return tuple(
        (internal.name, f"{internal.consequence}: {_version(internal.package)} moved {internal.symbol}")
        for internal in INTERNALS
        if not internal()
    )


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"this {package}"
