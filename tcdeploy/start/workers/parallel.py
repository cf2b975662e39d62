"""Compiles buckets of a plan in several processes at once.

The first process compiles the largest bucket, and *compile workers* (start/workers/process.py) the rest at the same
time. When it reaches a bucket of a worker, it waits until the worker has finished it, copies its files from the
worker's journal, and loads its programs from the cache. A bucket that a worker does not finish is compiled by the first
process, with a warning. A server with eager steps uses one worker for all buckets (start/eager.py).

With ahead-of-time programs, one worker compiles packages of the largest bucket, from the last to the first, while the
first process compiles them from the first to the last. Before each package, both look for those of the other. If there
is memory for few workers only, the first process compiles some of the other buckets too.

A worker compiles a copy of the model with few layers, random weights and few KV blocks, because a second copy of the
weights may not fit on the GPU. Layers of a kind share their programs, and the number of KV blocks is a symbol in them.

Rejected: a worker for the largest bucket. A worker imports torch first (8 s on an H100 machine), and the first process
would load the bucket's programs afterwards. In that time it loads the weights and begins to compile the bucket itself.
Rejected: threads. Tracing holds the GIL.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tcdeploy.cache.staging.folder import StagingFolder
from tcdeploy.cache.staging.restore import copy_finished_buckets
from tcdeploy.engine.check.check_prompts import CheckPrompts
from tcdeploy.engine.warm.warmup import warmup_order
from tcdeploy.errors import TcdeployError
from tcdeploy.host.progress import Progress
from tcdeploy.host.resources import count_cores
from tcdeploy.models.convert.scheme_weight import SchemeWeight
from tcdeploy.models.formats.methods import explicit_settings, without_settings
from tcdeploy.models.load import config_to_dict
from tcdeploy.models.short_config import layers_to_keep, shorten_config
from tcdeploy.models.weight_bytes import weight_bytes
from tcdeploy.planning.bucket_record import BucketRecord
from tcdeploy.planning.memory import gib
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.planning.recipe import Recipe
from tcdeploy.programs.regions import find_layers
from tcdeploy.start.planned import PlannedModel
from tcdeploy.start.workers.process import CompileProcess

# Inductor and Triton compile the kernels of one process on several cores.
CORES_PER_PROCESS = 4
# Weights below which a start uses one process: a worker costs seconds of CPU time for imports, and memory.
MIN_WEIGHT_BYTES = 1 << 30
# Device memory of a copy, as a multiple of its weights: the parity check also holds one layer or the head in float32.
COPY_FACTOR = 2
# Other buckets whose packages are compiled in the time of the largest bucket: 3 packages instead of 5, and no start.
LARGEST_SHARE = 2
HOST_BYTES_PER_PROCESS = 4 << 30  # about: torch, transformers and the compilers that Inductor starts
MAX_WORKERS = 4  # more would compete for the GPU and for the lock of the cache folder
log = logging.getLogger("tcdeploy.start")


class ShortCopy(NamedTuple):
    """The copy of a model that workers compile: its config.json, its layers, and the bytes of its weights."""

    config: dict[str, Any]
    num_layers: int
    weight_bytes: int


class OneProcess(NamedTuple):
    """Why all buckets are compiled in one process."""

    reason: str


class CompileWorkers:
    """The running compile workers of a start. The caller stops them.

    package_worker: compiles packages of the largest bucket from the last to the first, while the first process compiles
        them from the first to the last.
    """

    def __init__(
        self,
        staging: StagingFolder,
        workers: Sequence[CompileProcess] = (),
        package_worker: CompileProcess | None = None,
    ) -> None:
        self._staging, self._workers, self._package_worker = staging, tuple(workers), package_worker
        self._failed: list[CompileProcess] = []

    def __bool__(self) -> bool:
        """Whether workers were started."""
        return bool(self._workers)

    def wait_for(self, bucket: Bucket, progress: Progress) -> BucketRecord | None:
        """Wait until a worker has finished the bucket, and copy its files. None if none compiles it, or if it fails."""
        if self._package_worker is not None and bucket.name not in self._package_worker.buckets:
            self._package_worker.stop()  # the first process has finished the largest bucket
        worker = next((worker for worker in self._workers if bucket.name in worker.buckets), None)
        if worker is None:
            return None
        progress.detail(f"wait for {worker.description}")
        record = worker.wait_for(bucket.name)
        progress.detail("")
        if record is None:
            if worker not in self._failed:
                self._failed.append(worker)
                unfinished = ", ".join(name for name in worker.buckets if name not in worker.finished)
                log.warning("a compile worker did not compile %s, so this process does: %s", unfinished, worker.failure)
            return None
        copy_finished_buckets(self._staging)
        if worker.finished.keys() >= set(worker.buckets):
            worker.stop()  # free its memory, and the lock of its staging folder
        return record

    def stop(self) -> None:
        """End all workers, also those that compile."""
        for worker in filter(None, (*self._workers, self._package_worker)):
            worker.stop()


def make_short_copy(model: nn.Module, planned: PlannedModel) -> ShortCopy:
    """The model's first layers that have all of its programs. Raises ModelError if its config cannot be shortened."""
    plan, architecture = planned.plan, planned.architecture
    layers = find_layers(model, architecture)
    kinds = [layer.kind for layer in layers]
    count = layers_to_keep(kinds)
    values = config_to_dict(shorten_config(without_settings(planned.config), len(kinds), count))
    schemes = {path: item.layer_scheme for path, item in model.named_modules() if isinstance(item, SchemeWeight)}
    if schemes:
        values["quantization_config"] = explicit_settings(schemes, architecture.fp8_inputs)
    if architecture.dtype:
        values["dtype"] = architecture.dtype
    removed = tuple(f"{layer.path}." for layer in layers[count:])
    sizes = weight_bytes(model, plan.weight_dtype)
    return ShortCopy(values, count, sum(size for name, size in sizes.items() if not name.startswith(removed)))


def worker_recipe(planned: PlannedModel, prompts: CheckPrompts) -> Recipe:
    """The recipe of a worker: `few_blocks_recipe` with random weights. The config of the copy states the schemes."""
    recipe = few_blocks_recipe(planned, prompts)
    return dataclasses.replace(
        recipe, revision=None, load_format="dummy", generation_config="none", quantize=None, quantize_skip=None
    )


def few_blocks_recipe(planned: PlannedModel, prompts: CheckPrompts) -> Recipe:
    """The plan's choices that programs depend on, with as few KV blocks as warming needs."""
    plan = planned.plan
    checked = max(map(prompts.blocks_needed, plan.buckets))
    blocks = max(checked, plan.decode_buckets[-1].size, -(-plan.prefill_buckets[-1].size // plan.block_size)) + 1
    return dataclasses.replace(
        planned.recipe,
        device=plan.device,
        graphs=plan.graphs,
        shapes="dynamic" if plan.prefill_buckets[0].min_size else "bucket",
        buckets=tuple(bucket.size for bucket in plan.prefill_buckets),
        batch_sizes=tuple(bucket.size for bucket in plan.decode_buckets),
        context=None,  # of the config, and at most what the blocks hold
        block_size=plan.block_size,
        kv_blocks=min(blocks, plan.kv_blocks),
        mixed_steps="on" if plan.mixed_steps else "off",
        cache_dir=plan.cache_dir,
    )


def reason_for_one_process(recipe: Recipe, plan: Plan, cores: int) -> str:
    """Why all buckets are compiled in one process, whatever memory there is; "" if they need not be."""
    is_small = plan.weight_bytes < MIN_WEIGHT_BYTES
    reasons = {
        "--tune-seconds times variants": plan.tune_seconds > 0,
        "--mode max-autotune times kernels, which other processes would disturb": plan.mode == "max-autotune",
        "--trust-remote-code: a worker gets config.json, but not the repository's code": plan.trust_remote_code,
        "--require-signed does not allow compilation": recipe.require_signed,
        f"the model has {gib(plan.weight_bytes)} of weights; workers need {gib(MIN_WEIGHT_BYTES)}": is_small,
        "there is only one bucket": _max_shares(plan) < 1,
        f"{cores} CPU cores; two processes need {2 * CORES_PER_PROCESS}": cores < 2 * CORES_PER_PROCESS,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def share_buckets(
    recipe: Recipe, plan: Plan, copy: ShortCopy, cores: int, spare_bytes: int, host_bytes: int
) -> list[list[str]] | OneProcess:
    """The names of the buckets that each worker compiles, in its order. All but the largest bucket are shared out.

    With ahead-of-time programs, the first of several workers gets the largest bucket, and this process keeps the next
    ones too if there are few workers. `spare_bytes`: of the device, beside what this process will use.
    """
    if reason := reason_for_one_process(recipe, plan, cores):
        return OneProcess(reason)
    # An upper bound without snapshots: a copy has few KV blocks, and so few snapshots.
    copy_bytes = COPY_FACTOR * copy.weight_bytes + plan.slots * plan.bytes_per_slot + plan.workspace_bytes
    if spare_bytes < copy_bytes:
        return OneProcess(f"{gib(spare_bytes)} are free beside the model; a copy needs {gib(copy_bytes)}")
    if host_bytes < 2 * HOST_BYTES_PER_PROCESS:
        return OneProcess(f"{gib(host_bytes)} of host memory; two processes need {gib(2 * HOST_BYTES_PER_PROCESS)}")
    by_host = min(cores // CORES_PER_PROCESS, host_bytes // HOST_BYTES_PER_PROCESS) - 1
    num_workers = min(_max_shares(plan), MAX_WORKERS, spare_bytes // copy_bytes, by_host)
    largest, *order = [bucket.name for bucket in warmup_order(plan)]
    package_share = [[largest]] if plan.programs == "aot" and num_workers > 1 else []
    num_workers -= len(package_share)
    if plan.programs == "aot":
        order = order[max(0, (len(order) + LARGEST_SHARE) // (num_workers + 1) - LARGEST_SHARE) :]
    return package_share + [order[number::num_workers] for number in range(num_workers)]


def _max_shares(plan: Plan) -> int:
    """The number of buckets but the largest, which one more worker may share with ahead-of-time programs."""
    others = len(plan.buckets) - 1
    return others + 1 if plan.programs == "aot" and others else others


def count_spare_bytes(planned: PlannedModel) -> int:
    """Free bytes of the GPU, or the host's memory, less weights, KV cache and workspace.

    Traced weights are on the device already, others are not. A lower bound: `workspace_bytes` includes the CUDA
    context, which the free bytes lack already. The difference is left for the parity check.
    """
    plan, traced = planned.plan, planned.traced_model
    free = planned.environment.host_memory_bytes
    if plan.device == "cuda":
        free = torch.cuda.mem_get_info()[0] + (traced.num_bytes if traced is not None else 0)
    return int(free) - plan.weight_bytes - plan.state_bytes - plan.workspace_bytes


def start_workers(planned: PlannedModel, prompts: CheckPrompts, staging: StagingFolder) -> CompileWorkers:
    """Start workers for all buckets but the largest, or none if that would not be faster or possible.

    Call it after traced weights are allocated, and before transformers loads others.
    """
    recipe, plan, environment = planned.recipe, planned.plan, planned.environment
    cores = count_cores()
    if reason := reason_for_one_process(recipe, plan, cores):
        log.info("all buckets are compiled in one process: %s", reason)
        return CompileWorkers(staging)
    try:
        short_copy = make_short_copy(planned.fake_model, planned)
    except Exception as error:  # a config may raise any exception when its layers are removed
        log.warning(
            "all buckets are compiled in one process, because the model's config cannot be shortened: %s", error
        )
        return CompileWorkers(staging)
    spare_bytes = count_spare_bytes(planned)
    shares = share_buckets(recipe, plan, short_copy, cores, spare_bytes, environment.host_memory_bytes)
    if isinstance(shares, OneProcess):
        log.info("all buckets are compiled in one process: %s", shares.reason)
        return CompileWorkers(staging)
    log.info("compile workers have %d of %d layers", short_copy.num_layers, planned.architecture.num_layers)
    workers: list[CompileProcess] = []
    try:
        for names in shares:
            workers.append(CompileProcess(worker_recipe(planned, prompts), short_copy.config, plan.key, names))
    except (TcdeployError, OSError) as error:
        log.warning("buckets without a compile worker are compiled in this process: %s", error)
    except BaseException:
        CompileWorkers(staging, workers).stop()
        raise
    largest = warmup_order(plan)[0].name
    package_worker = next((worker for worker in workers if largest in worker.buckets), None)
    others = [worker for worker in workers if worker is not package_worker]
    if package_worker is not None and not others:  # the others could not be started
        package_worker.stop()
        package_worker = None
    return CompileWorkers(staging, others, package_worker)
