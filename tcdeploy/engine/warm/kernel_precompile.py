"""Launches the Triton kernels of a start's first steps in advance, so that threads compile them in parallel.

The steps run uncompiled, and their launches only compile (torch_compat/inductor/parallel_kernels.py). Compiled prefill
steps launch the same attention kernels. Compiled decode steps may launch others, because of programs/passes/ and
kernels/linear/; these are compiled at their first launch.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator

from tcdeploy.cache.files.usage import FileAccessTracker
from tcdeploy.engine.check.check_prompts import CheckPrompts
from tcdeploy.engine.check.inputs import make_small_batch
from tcdeploy.engine.check.parity_check import run_check_steps
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.planning.backends import BACKENDS
from tcdeploy.planning.plan import Bucket

log = logging.getLogger("tcdeploy.engine")


@contextlib.contextmanager
def compiling_kernels_of(
    runner: ModelRunner, buckets: Collection[Bucket], prompts: CheckPrompts, tracker: FileAccessTracker
) -> Iterator[None]:
    """Compile these buckets' Triton kernels in threads while the block runs, and wait for them at its end.

    Does nothing on a CPU, or if decode attention uses no Triton. Enter it before programs are installed.
    """
    plan = runner.plan
    if not buckets or plan.device != "cuda" or not BACKENDS[plan.decode_attention].uses_triton:
        yield
        return
    from tcdeploy.torch_compat.inductor.parallel_kernels import compiling_kernels  # imports Triton

    with tracker.track(), compiling_kernels(lambda: precompile_kernels(runner, buckets, prompts)):
        yield


def precompile_kernels(runner: ModelRunner, buckets: Iterable[Bucket], prompts: CheckPrompts) -> None:
    """Launch the kernels of the buckets' checks, and of the CUDA graphs that are captured before the first request.

    Call it before programs are installed. An exception is logged, not raised: if its cause persists, a later step of
    the start raises it.
    """
    try:
        with runner.uncounted_steps():
            for bucket in buckets:
                _launch_kernels_of(runner, bucket, prompts)
    except Exception as error:  # of torch, Triton or CUDA, which share no base class
        log.info("not all kernels are compiled in advance: %s", error)
    runner.row_assignment.clear()


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
