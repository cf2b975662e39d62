"""Compiles steps ahead of time to packages in the cache folder, from which packages.py runs them.

A package is found under `aot/KEY`. KEY hashes what programs depend on besides their graphs: the plan's key, the sources
of our ops, of the export and of the model, and the torch settings in torch's cache key. A start that finds its packages
does not trace the model, so a change of one of these would otherwise go undetected.

transformers loads the model. Its forward runs uncompiled steps and computes the reference of the parity check. Later
starts need neither (start/packages.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn
from torch.export import ExportedProgram

from tcdeploy.cache.folder.layout import AOT_DIR
from tcdeploy.errors import CompileError, TcdeployError
from tcdeploy.models.sources import model_sources
from tcdeploy.planning.keys import source_digests
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.planning.variants import Variant
from tcdeploy.programs import compile_stats
from tcdeploy.programs.cxx_runtime import check_cxx_runtime
from tcdeploy.programs.export import ExportedStep, export_step
from tcdeploy.programs.jit import inductor_options
from tcdeploy.programs.model_forward import StepInputs, TransformersForward, step_tensors
from tcdeploy.programs.packages import PackagedForward, StepProgramKey
from tcdeploy.programs.passes.foreign_ops import graph_modules
from tcdeploy.programs.roles import ROLE, TOKEN_DIMS, compiling, log_no_roles
from tcdeploy.programs.stances import current_stance
from tcdeploy.programs.step_program import StepProgram
from tcdeploy.programs.traced_layers import TracedLayer
from tcdeploy.torch_compat.dynamo import compile_refusal
from tcdeploy.torch_compat.dynamo.mark_dynamic import mark_dynamic
from tcdeploy.torch_compat.inductor.aot_package import start_package

# Files of this package that decide what an exported program computes or how it is stored, beside those of `sources`.
HASHED_FILES = (
    "kernels/attention/interface.py", "kernels/experts/interface.py", "programs/aot.py", "programs/export.py",
    "programs/graph_parts.py", "programs/model_forward.py", "programs/packages.py", "programs/regions.py",
    "programs/roles.py", "programs/step_program.py",
    "models/convert/packed_linears.py", "models/convert/scheme_linear.py", "models/convert/scheme_weight.py",
    "models/sources.py", "models/convert/static_rope.py", "torch_compat/inductor/aot_package.py",
    "torch_compat/inductor/aot_pdl.py", "torch_compat/inductor/package_builds.py",
    "torch_compat/dynamo/mark_dynamic.py", "torch_compat/dynamo/operation_trace.py",
)  # fmt: skip


class PackageExchange(NamedTuple):
    """Callbacks through which processes that compile the same step share packages, and report them."""

    fetch: Callable[[], None] = lambda: None  # before a compilation: copies packages of other processes to this folder
    offer: Callable[[Path], None] = lambda path: None  # with the path of each package that this process has compiled
    report: Callable[[str], None] = lambda text: None  # with each package of a step, before it is compiled


class AotForward(PackagedForward):
    """Runs a step from its packages, after compiling those that are missing; under `force_eager`, the model's code."""

    def __init__(
        self, transformers_forward: TransformersForward, layers: Sequence[TracedLayer], plan: Plan, folder: Path,
        is_copy: bool = False, exchange: PackageExchange = PackageExchange(),  # noqa: B008 - immutable
    ) -> None:  # fmt: skip
        """`folder`: where the packages of this plan are, or will be (`package_folder`).

        `is_copy`: the model is a copy with fewer layers than the model of the plan (start/workers/parallel.py). It has
        the same packages, but other step programs, which are neither read nor written then. It compiles the packages of
        a step from the last to the first, so it shares the work with the process that has the model.
        """
        constants = _constants(transformers_forward.model, layers)
        super().__init__(constants, transformers_forward.supports_logits_to_keep, plan, folder)
        self._uncompiled, self._layers = transformers_forward, layers
        self._is_copy, self._exchange = is_copy, exchange
        self._equal_layers: tuple[int, ...] | None = None  # see ExportedStep; None: no step was exported yet
        self._unfinished: dict[Path, Future[None]] = {}  # packages that threads compile

    def __call__(self, inputs: StepInputs) -> Tensor:
        """Logits [outputs, vocab]. Raises RecompileError if the step has no package and nothing may be compiled."""
        if current_stance() == "eager":
            return self._uncompiled(inputs._replace(selects_in_last_layer=False))
        return super().__call__(inputs)

    def _make(self, key: StepProgramKey, inputs: StepInputs) -> StepProgram:
        compile_refusal.check(f"a package of variant {key.variant.name}")
        exported_step = self._export(key, inputs)
        programs = list(exported_step.exported.items())
        if self._is_copy:
            if key.selects_in_last_layer:  # `_load` also loads the step that selects rows at the head
                at_head = self._with_exported_rows(inputs._replace(selects_in_last_layer=False))
                step_with_rows_at_head = self._export(key._replace(selects_in_last_layer=False), at_head)
                programs = list({**exported_step.exported, **step_with_rows_at_head.exported}.items())
            programs.reverse()
        self.folder.mkdir(parents=True, exist_ok=True)
        for number, (name, exported) in enumerate(programs, 1):
            self._exchange.report(f"package {number} of {len(programs)}")
            self._provide_package(name, exported, key.variant)
        self._exchange.report("C++ compiler")
        self._finish_packages(wait=True)
        self._exchange.report("")
        if not self._is_copy:
            (self.folder / key.file_name).write_text(exported_step.step_program.to_json())
        return exported_step.step_program

    def _export(self, key: StepProgramKey, inputs: StepInputs) -> ExportedStep:
        variant = key.variant
        flags = (variant.inductor_config, variant.skinny_gemm, variant.inplace_residual, variant.fused_epilogues)
        _mark_dynamic_sizes(key.bucket, inputs)
        try:
            exported_step = export_step(self._uncompiled.model, self._layers, inputs, repr(flags), self._equal_layers)
        except (OSError, TcdeployError):
            raise
        except Exception as error:  # torch.export and modelling code raise many types
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
            raise CompileError(
                f"{self._plan.model} cannot be compiled ahead of time: {reason}", "use --programs jit"
            ) from error
        self._equal_layers = exported_step.equal_layers
        return exported_step

    def _provide_package(self, name: str, exported: ExportedProgram, variant: Variant) -> None:
        """Start to compile a package, unless the folder or another process has it."""
        path = self.package_path(name)
        self._finish_packages(wait=False)
        if not path.is_file():
            self._exchange.fetch()
        if path.is_file():
            compile_stats.packages_loaded += name not in self._programs
            return
        check_cxx_runtime()
        partial = path.with_suffix(".partial.pt2")  # a failed compilation may leave a part of the file
        with _compiling(exported):
            self._unfinished[path] = start_package(exported, str(partial), inductor_options(variant, self._plan))

    def _finish_packages(self, wait: bool) -> None:
        """Offer the packages that are compiled; with `wait`, all that were started."""
        for path, future in list(self._unfinished.items()):
            if wait or future.done():
                del self._unfinished[path]
                future.result()
                os.replace(path.with_suffix(".partial.pt2"), path)
                compile_stats.packages_compiled += 1
                self._exchange.offer(path)

    def _read(self, key: StepProgramKey) -> StepProgram | None:
        return None if self._is_copy else super()._read(key)


def package_folder(
    cache_dir: str, plan_key: str, sources: Mapping[str, str], torch_settings: Mapping[str, str], model: nn.Module
) -> Path:
    """The folder of a plan's packages. Its name changes with what their programs depend on."""
    package = Path(__file__).parent.parent
    own_sources = source_digests(package, [package / path for path in HASHED_FILES])
    factors = [plan_key, dict(sources), own_sources, dict(torch_settings), model_sources(model)]
    digest = hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:16]
    return Path(cache_dir, AOT_DIR, digest)


def _compiling(exported: ExportedProgram) -> contextlib.AbstractContextManager[None]:
    """The context in which our passes find the roles of the program's inputs."""
    if len(list(graph_modules(exported))) > 1:  # the passes run on its subgraphs too
        log_no_roles("it has branches or loops")
        return contextlib.nullcontext()
    inputs = exported.graph.find_nodes(op="placeholder")
    return compiling([node.meta[ROLE] for node in inputs], [node.meta["val"] for node in inputs])


def _mark_dynamic_sizes(bucket: Bucket, inputs: StepInputs) -> None:
    """The number of rows of every prefill step, and the number of tokens of a dynamic bucket."""
    if inputs.rows is not None:
        mark_dynamic(inputs.rows, 0)
    if bucket.min_size:
        tensors = step_tensors(inputs)
        for name, dim in TOKEN_DIMS.items():
            mark_dynamic(tensors[name], dim, min=bucket.min_size, max=bucket.size)


def _constants(model: nn.Module, layers: Sequence[TracedLayer]) -> dict[str, Tensor]:
    """Weights, buffers and states by their names in a step program."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    constants: dict[str, Tensor] = {f"weight/{name}": tensor for name, tensor in tensors}
    for layer in layers:
        constants |= layer.named_state
    return constants
