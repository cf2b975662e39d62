"""Compile the regions in place, and hold what may be compiled when.

`torch.compile(fullgraph=True, dynamic=False)` of one function that takes the region as an argument: torch keeps one
program per bucket and candidate for all layers of a kind, and a graph break is an error instead of a slow path. CUDA
graphs of the whole step are ours (engine/graphs.py), so Inductor's own are off unless `graphs` is region.

Four regimes, each a context manager: `translate_compile_errors` (warm-up: programs may be made; torch's errors become ours),
`without_compile_workers` (within it: they are in the cache), `force_eager` (the same modules uncompiled, to compare with), `fail_on_recompile` (after
warm-up: a compile is an error).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tcdeploy.attention.interface import AttentionMetadata
from tcdeploy.cache.toolchain import NO_COMPILER_MESSAGE
from tcdeploy.errors import CompileError, RecompileError, SpaceError
from tcdeploy.passes.post_grad import PostGradPass
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.planning.variants import Variant
from tcdeploy.torch_compat.compile_errors import is_compile_error, is_graph_break
from tcdeploy.torch_compat.compile_stack import import_compile_stack
from tcdeploy.torch_compat.compiled_call import get_compiled_call, run_uncompiled, set_compiled_call
from tcdeploy.torch_compat.custom_graph_pass import pass_options
from tcdeploy.torch_compat.mark_dynamic import mark_dynamic, tensors_in

import_compile_stack()

post_grad_pass = functools.cache(PostGradPass)  # torch compares options by identity
PROGRAMS_PER_BUCKET_LIMIT = 12  # kinds of layers and edges we allow for; torch stops at 8 in all by default
NEARLY_FULL_BYTES = 1 << 20


def compile_regions(
    regions: list[nn.Module], head_modules: list[nn.Module], plan: Plan, step: AttentionMetadata
) -> None:
    """Compile every region in place; torch makes the programs when each bucket first runs.

    `step` is the layers': its `variant` says how the running bucket's program is to be made. Edges (what runs before
    and after the layers) are compiled in decode only, where their few microseconds count, and if the candidate says so.
    """
    tried = sum(len(plan.variants(bucket)) for bucket in plan.buckets)
    limit = PROGRAMS_PER_BUCKET_LIMIT * (tried + 1)
    config = torch.compiler.config
    config.recompile_limit = max(limit, config.recompile_limit)
    config.accumulated_recompile_limit = max(limit * len(regions), config.accumulated_recompile_limit)
    for region in regions:
        _compile_in_place(region, plan, step, is_last=region is regions[-1])
        for bucket in plan.buckets:
            if bucket.min_size:
                _mark_token_dims_dynamic(region, step, bucket)
    for head_module in head_modules:
        _compile_in_place(head_module, plan, step, is_head=True)


def _compile_in_place(
    region: nn.Module, plan: Plan, step: AttentionMetadata, is_head: bool = False, is_last: bool = False
) -> None:
    """Fill the slot that `region.compile()` would fill, with one compiled call per candidate.

    `region.compile()` knows one set of options, and buckets differ in theirs; programs of one candidate are still
    shared by all layers, because torch compares options by value. Covered by tests/engine/
    test_tuning.py::test_each_bucket_runs_the_program_of_its_own_candidate.
    """
    compiled: dict[Variant, Callable[..., Any]] = {}

    def call(*args: Any, **kwargs: Any) -> Any:
        if is_head and (step.is_prefill or not step.variant.compile_head):
            return run_uncompiled(region, *args, **kwargs)
        program = compiled.get(step.variant)
        if program is None:
            options = inductor_options(step.variant, plan.graphs)
            program = torch.compile(_run_region, fullgraph=True, dynamic=False, options=options)
            compiled[step.variant] = program
        return program(region, step.last_token_rows if is_last else None, *args, **kwargs)

    set_compiled_call(region, call)


def _run_region(region: nn.Module, rows: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """What is compiled: the region is an argument, so layers share programs. `rows`: the tokens that are wanted.

    A function of ours, because torch runs the frames of its own modules (a head is a plain nn.Linear) uncompiled.
    """
    out = run_uncompiled(region, *args, **kwargs)
    return out if rows is None else out[:, rows]


def inductor_options(variant: Variant, graphs: str) -> dict[str, Any]:
    """A candidate's settings of Inductor, with our pass; all are in the key of torch's cache, our ops' sources too."""
    rewrite = post_grad_pass(variant.skinny_gemm, variant.inplace_residual, variant.fused_epilogues)
    own_graphs = {"triton.cudagraphs": True} if graphs == "region" else {}
    return {**pass_options(rewrite), **own_graphs, **dict(variant.inductor_config)}


def _mark_token_dims_dynamic(region: nn.Module, step: AttentionMetadata, bucket: Bucket) -> None:
    """Tell torch, at the region's door, which sizes are token counts that vary within the bucket.

    The tensors are made by the eager code before the region, so this is the first place that sees them. It wraps
    the slot that `module.compile()` fills: torch.nn.Module has no public hook that runs outside the program. Covered
    by test_programs.py::test_a_dynamic_range_is_one_program.
    """
    compiled = get_compiled_call(region)
    assert compiled is not None

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if step.is_prefill:
            for tensor, dim in _token_dims(step, args, kwargs):
                mark_dynamic(tensor, dim, min=bucket.min_size, max=bucket.size)
        return compiled(*args, **kwargs)

    set_compiled_call(region, call)


def _token_dims(step: AttentionMetadata, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, int]]:
    """(tensor, dim) of everything sized by tokens that enters a region: what is [1, tokens, ...], and the slots."""
    for item in tensors_in((args, kwargs)):
        if item.ndim >= 2 and item.shape[0] == 1:
            yield item, 1
    yield step.slot_mapping, 0


@contextlib.contextmanager
def force_eager() -> Iterator[None]:
    """Run compiled modules as if they were not."""
    with torch.compiler.set_stance("force_eager"):
        yield


@contextlib.contextmanager
def fail_on_recompile() -> Iterator[None]:
    """From here on nothing may compile. Raises RecompileError with torch's reason."""
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            yield
    except RuntimeError as error:
        if "fail_on_recompile" in str(error):
            raise RecompileError(
                f"a compile after warm-up: {error}", "tcdeploy warm with a bucket for this shape"
            ) from error
        raise


@contextlib.contextmanager
def translate_compile_errors(plan: Plan, cache_dir: str) -> Iterator[None]:
    """Translate what torch raises while it compiles: graph breaks, a full disk, too little GPU memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise SpaceError(
            f"the GPU ran out of memory while warming: {str(error).splitlines()[0]}",
            "lower --memory-fraction, or leave out the largest bucket",
        ) from error
    except (RuntimeError, OSError) as error:
        if isinstance(error, OSError) or is_compile_error(error) or _is_disk_full(error, cache_dir):
            raise _translate_error(error, plan, cache_dir) from error
        raise


def _translate_error(error: BaseException, plan: Plan, cache_dir: str) -> Exception:
    if _is_disk_full(error, cache_dir):
        free = shutil.disk_usage(cache_dir).free
        return SpaceError(
            f"the disk of the cache folder {cache_dir} is full ({free} bytes free)",
            "what was cached is intact: free some room, or name another --cache-dir, and run again",
        )
    text = str(error).strip()
    if is_graph_break(error):
        hint = "--explain-breaks shows the line"
        if plan.region == "layer":
            hint += "; --region blocks compiles attention and MLP apart, --graphs none leaves norm and head uncompiled"
        return CompileError(
            f"{plan.model} does not trace whole with --region {plan.region}: {text.splitlines()[0]}", hint
        )
    if "InvalidCxxCompiler" in text or NO_COMPILER_MESSAGE in text:
        return CompileError(
            f"{plan.model} needs a program that is not in the cache folder {cache_dir}, and there is no C++ compiler",
            "install g++, or start from a cache that was warmed with these flags: tcdeploy cache why",
        )
    return CompileError(
        f"torch.compile failed on {plan.model}: {_first_words(text)[:400]}", "TCDEPLOY_DEBUG=1 shows all"
    )


def _first_words(text: str) -> str:
    """The first line, and the next ones as long as they only introduce what follows."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = next((number for number, line in enumerate(lines) if not line.endswith(":")), len(lines) - 1)
    return " ".join(lines[: kept + 1])


def _is_disk_full(error: BaseException | None, cache_dir: str) -> bool:
    """The compiler's own children report a full disk as text, or not at all: so the disk is asked as well."""
    while error is not None:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return shutil.disk_usage(cache_dir).free < NEARLY_FULL_BYTES
