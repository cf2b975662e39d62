"""What a start checks before it loads programs that were compiled on a machine without the GPU.

The plan's key contains the GPU's name, compute capability and number of multiprocessors, so a start on another GPU does
not find the plan. Other values of a description decide how kernels are compiled, and are compared here.
"""

from __future__ import annotations

import contextlib
import logging
import zipfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from tcdeploy.cache.record.manifest import BlindBuild, Manifest, read_manifests
from tcdeploy.cache.staging.folder import StagingFolder
from tcdeploy.engine.check.check_prompts import CheckPrompts
from tcdeploy.engine.check.reference import tokens_per_pass
from tcdeploy.engine.warm.early_gpu import loading_products
from tcdeploy.errors import IntegrityError, MismatchError
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.gpu_description import GPUDescription, describe_first_gpu
from tcdeploy.planning.plan import Plan
from tcdeploy.start.planned import PlannedModel
from tcdeploy.torch_compat.blind.cubin import architecture

# Fields of a description on which compiled code depends. The memory that torch reports differs between drivers, and
# clocks only affect whether a product is padded.
COMPILED_FIELDS = (
    "name", "capability", "multiprocessors", "l2_bytes", "shared_bytes_per_block", "shared_bytes_per_multiprocessor",
    "registers_per_multiprocessor", "threads_per_multiprocessor",
)  # fmt: skip
MAX_PRODUCT_ROWS = 65_536  # n of a weight [n, k]; leaves out the head of a large vocabulary
HINT = "build for this GPU: tcdeploy doctor --describe-gpu > GPU.json, then tcdeploy warm MODEL --target-gpu GPU.json"
log = logging.getLogger("tcdeploy.start")


def check_first_start(earlier: Manifest, environment: Environment, staging: StagingFolder) -> None:
    """Check the description and the kernels of a plan that no start has run.

    Raises MismatchError for another GPU, and for kernels of another architecture before any is loaded.
    """
    assert earlier.blind is not None
    check_description(earlier.blind, describe_first_gpu(environment))
    expected = architecture_of(earlier.blind.target)
    for name, found in _kernel_architectures(earlier, Path(staging.path)):
        if found != expected:
            raise MismatchError(f"{name} is compiled for sm_{found}, and this GPU requires sm_{expected}", HINT)
    log.info("the programs were compiled without a GPU; they are run and checked for the first time")


def check_description(build: BlindBuild, here: GPUDescription) -> None:
    """Raise MismatchError if the programs were compiled for a GPU with other properties."""
    for name in COMPILED_FIELDS:
        described, found = getattr(build.target, name), getattr(here, name)
        if described != found:
            raise MismatchError(
                f"the programs were compiled for a GPU whose {name} is {described}, and that of {here.name} is {found}",
                HINT,
            )


def loading_reference_products(planned: PlannedModel, prompts: CheckPrompts) -> contextlib.AbstractContextManager[None]:
    """Load the reference's GEMM kernels while the model is loaded.

    Only for first starts: others read a stored reference, or compile while they compute it.
    """
    plan = planned.plan
    if plan.device != "cuda":
        return contextlib.nullcontext()
    shapes = product_shapes(planned.fake_model, planned.architecture.packed_linears)
    return loading_products(shapes, tokens_per_pass(plan, prompts), getattr(torch, plan.compute_dtype))


def product_shapes(model: nn.Module, packed_linears: tuple[tuple[str, ...], ...]) -> set[tuple[int, int]]:
    """[n, k] of the weights of linear layers; packed layers count as one.

    Layers with more than MAX_PRODUCT_ROWS outputs are left out: the head multiplies few rows.
    """
    sizes = {
        path: (module.out_features, module.in_features)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.out_features <= MAX_PRODUCT_ROWS
    }
    groups = [[sizes.pop(path) for path in paths] for paths in packed_linears if sizes.keys() >= set(paths)]
    return {*sizes.values(), *((sum(n for n, _ in group), group[0][1]) for group in groups)}


def architecture_of(target: GPUDescription) -> int:
    """As `cubin.architecture` returns it: 90 for 9.0."""
    major, minor = target.capability
    return 10 * major + minor


def report_other_targets(plan: Plan, environment: Environment, may_compile: bool) -> None:
    """Name the other GPUs for which plans of this model in the cache folder were built.

    Raises MismatchError unless this start `may_compile`.
    """
    here = environment.gpu if plan.device == "cuda" else plan.device
    manifests = read_manifests(plan.cache_dir, skip_damaged=True).values()
    built = {item.blind.target.name for item in manifests if item.blind and item.plan["model"] == plan.model}
    if not (targets := ", ".join(sorted(built - {here}))):
        return
    message = f"the programs of {plan.model} in {plan.cache_dir} were built for {targets}; this start is on {here}"
    if not may_compile:
        raise MismatchError(message, HINT)
    log.warning("%s, so they are not used", message)


def _kernel_architectures(manifest: Manifest, folder: Path) -> Iterator[tuple[str, int]]:
    """(path, architecture) of each cubin among the plan's files, those in packages included.

    Raises IntegrityError for a file that cannot be read.
    """
    for file in manifest.files:
        path = folder / file.path
        try:
            if file.path.endswith(".cubin"):
                yield file.path, architecture(path.read_bytes())
            elif file.path.endswith(".pt2"):
                with zipfile.ZipFile(path) as package:
                    for name in package.namelist():
                        if name.endswith(".cubin"):
                            yield f"{file.path}:{name}", architecture(package.read(name))
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise IntegrityError(
                f"{path} cannot be read: {error}", "build it again, or compile here: --on-bad-cache rebuild"
            ) from error
