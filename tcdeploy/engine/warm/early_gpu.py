"""Prepares the GPU in threads, while a start does something else.

`start_initializing_gpu` loads CUDA's libraries and the kernels of operators, which would otherwise be loaded at their
first use. These calls mostly do not hold the GIL.

`compiling_kernels_of` launches the Triton kernels of a start's first steps. The steps run uncompiled, and their
launches only compile (torch_compat/inductor/parallel_kernels.py). Compiled prefill steps launch the same attention
kernels. Compiled decode steps may launch others, because of programs/passes/ and kernels/linear/; these are compiled at
their first launch.

`loading_products` multiplies matrices of the model's shapes, so that cuBLAS's kernels are loaded before the reference
uses them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator

import torch
from torch.nn import functional

from tcdeploy.cache.files.usage import FileAccessTracker
from tcdeploy.engine.check.check_prompts import CheckPrompts
from tcdeploy.engine.check.inputs import make_small_batch
from tcdeploy.engine.check.parity import compare_logits, greedy_tokens, outlier_rows
from tcdeploy.engine.check.parity_check import run_check_steps
from tcdeploy.engine.check.precise_math import split_gemm
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.planning.backends import BACKENDS
from tcdeploy.planning.plan import Bucket

ROWS, COLUMNS = 8, 256
PINNED_BYTES = [1 << power for power in range(6, 17)]  # sizes of uploads to decode rows
_initialization: threading.Thread | None = None  # the latest
log = logging.getLogger("tcdeploy.engine")


def start_initializing_gpu() -> Callable[[], None]:
    """Initialise the current GPU, if any, in a thread. Returns a function that waits for it.

    While the thread runs, further calls start no other. The thread only logs errors: the caller's next CUDA call raises
    them. Does nothing if this process has used the GPU before: cuBLAS would keep a workspace of 32 MiB for the thread.
    """
    global _initialization
    if _initialization is None or not _initialization.is_alive():
        if not torch.cuda.is_available() or torch.cuda.is_initialized():
            return do_nothing
        _initialization = threading.Thread(target=_initialize, name="gpu-initialization")
        _initialization.start()
    return _initialization.join


def do_nothing() -> None:
    pass


def _initialize() -> None:
    try:
        _use_libraries(torch.device("cuda"))
        torch.cuda.synchronize()
    except Exception as error:  # such as a busy or broken GPU, which the start reports at its next call
        log.debug("the GPU could not be initialised in advance: %s", error)


@torch.no_grad()
def _use_libraries(device: torch.device) -> None:
    """Run a product of cuBLAS and the operators of the parity check; allocate page-locked memory, which torch keeps."""
    for size in PINNED_BYTES:
        torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    x = torch.ones(ROWS, COLUMNS, dtype=torch.bfloat16, device=device)
    torch.mm(x, x.T)
    logits = x.float()
    sample = torch.ones(ROWS, 2, dtype=torch.float64)
    compared = (logits, logits, logits, "bfloat16", "float32", sample)
    compare_logits(*compared)
    outlier_rows(*compared)
    greedy_tokens([[0]], x)


@contextlib.contextmanager
def loading_products(shapes: Collection[tuple[int, int]], rows: int, dtype: torch.dtype) -> Iterator[None]:
    """Load the GEMM kernels of a reference in a thread while the block runs, which cuBLAS does at their first use.

    `shapes`: [n, k] of the weights. `rows`: of the activations.
    """
    thread = threading.Thread(target=_multiply, args=(shapes, rows, dtype), name="gpu-products")
    thread.start()
    try:
        yield
    finally:
        thread.join()


@torch.no_grad()
def _multiply(shapes: Collection[tuple[int, int]], rows: int, dtype: torch.dtype) -> None:
    """Multiply as the passes of engine/check/reference.py do, in both precisions."""
    try:
        for n, k in shapes:
            activations, weight = (torch.zeros(size, k, dtype=dtype, device="cuda") for size in (rows, n))
            functional.linear(activations[None], weight)
            if dtype == torch.bfloat16:
                split_gemm(activations.float(), weight.T)
    except Exception as error:  # such as too little memory: then the reference loads them
        log.debug("products were not loaded in advance: %s", error)


@contextlib.contextmanager
def compiling_kernels_of(
    runner: ModelRunner, buckets: Collection[Bucket], prompts: CheckPrompts, tracker: FileAccessTracker,
    samples: bool = True,
) -> Iterator[None]:  # fmt: skip
    """Compile these buckets' Triton kernels in threads while the block runs, and wait for them at its end.

    Does nothing on a CPU, or if decode attention uses no Triton. Enter it before programs are installed. `samples`:
    compile the kernels of sampling too, which are the same for all buckets.
    """
    plan = runner.plan
    if not buckets or plan.device != "cuda" or not BACKENDS[plan.decode_attention].uses_triton:
        yield
        return
    from tcdeploy.torch_compat.inductor.parallel_kernels import compiling_kernels  # imports Triton

    with tracker.track(), compiling_kernels(lambda: precompile_kernels(runner, buckets, prompts, samples)):
        yield


def precompile_kernels(
    runner: ModelRunner, buckets: Iterable[Bucket], prompts: CheckPrompts, samples: bool = True
) -> None:
    """As `launch_kernels`. An exception is logged, not raised: if its cause persists, a later step raises it."""
    try:
        launch_kernels(runner, buckets, prompts, samples)
    except Exception as error:  # of torch, Triton or CUDA, which share no base class
        log.info("not all kernels are compiled in advance: %s", error)
    runner.row_assignment.clear()
    runner.filled_state = None


def launch_kernels(runner: ModelRunner, buckets: Iterable[Bucket], prompts: CheckPrompts, samples: bool) -> None:
    """Launch the kernels of the buckets' checks, of the CUDA graphs captured before the first request, and of sampling.

    Leaves sequences in the decode rows.
    """
    with runner.uncounted_steps():
        for bucket in buckets:
            _launch_kernels_of(runner, bucket, prompts)
            runner.filled_state = None  # launches that only compile write no keys and values
        if samples:
            runner.launch_sampling_kernels()


def _launch_kernels_of(runner: ModelRunner, bucket: Bucket, prompts: CheckPrompts) -> None:
    run_check_steps(runner, bucket, prompts)
    if not runner.plan.uses_cuda_graph(bucket) or bucket in runner.eager_buckets:
        return
    keys = runner.graphs.early_keys(bucket)
    for key in keys:  # sizes in between launch the same kernels as the largest or the smallest one
        if key.tokens in (keys[0].tokens, keys[-1].tokens):
            runner.run_uncaptured(key)
    if bucket.min_size:  # attention has other kernels for few tokens
        make_small_batch(runner, bucket).run_in_two_chunks()
