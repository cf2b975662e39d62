"""Runs steps from ahead-of-time compiled packages in the cache folder, and compiles those that are missing.

    aot/KEY/prefill-512_default.json   the calls of a step (step_program.py)
    aot/KEY/0123456789abcdef.pt2       a program, which several steps may share
    aot/.unpacked/                     the libraries of loaded packages, in the staging folder of a start only

KEY hashes what programs depend on besides their graphs: the plan's key, the sources of our ops, of the export and of
the model, and the torch settings in torch's cache key. A start that finds its packages does not trace the model, so a
change of one of these would otherwise go undetected. A step program holds the dtype, shape and strides of each input,
and `LoadedStep` checks them before it calls a package.

transformers still loads the model. Its forward runs uncompiled steps and computes the reference of the parity check.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from tcdeploy.cache.contents import AOT_DIR
from tcdeploy.compiler import aot_counts
from tcdeploy.compiler.export import TracedLayer, export_step
from tcdeploy.compiler.jit import inductor_options
from tcdeploy.compiler.model_forward import StepInputs, TransformersForward, step_tensors
from tcdeploy.compiler.stances import current_stance
from tcdeploy.compiler.step_program import LoadedStep, RunProgram, StepProgram, parse_step_program
from tcdeploy.errors import CompileError, RecompileError, TcdeployError
from tcdeploy.models.sources import model_sources
from tcdeploy.planning.keys import source_digests
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.planning.variants import Variant
from tcdeploy.torch_compat.aot_package import compile_package, load_package
from tcdeploy.torch_compat.mark_dynamic import mark_dynamic

UNPACK_FOLDER = ".unpacked"  # in the staging folder, which is removed when the process ends
# Files of this package that decide what an exported program computes or how it is stored, beside those of `sources`.
HASHED_FILES = (
    "attention/interface.py", "compiler/aot.py", "compiler/export.py", "compiler/graph_parts.py",
    "compiler/model_forward.py", "compiler/step_program.py", "models/packed_linears.py", "models/sources.py",
    "models/static_rope.py", "torch_compat/aot_package.py",
)  # fmt: skip


class _StepKey(NamedTuple):
    bucket: Bucket
    variant: Variant
    selects_in_last_layer: bool

    @property
    def file_name(self) -> str:
        """Without a dot before the suffix: files of one stem are kept together (cache/contents.py)."""
        rows = "_rows-in-last-layer" if self.selects_in_last_layer else ""
        return f"{self.bucket.name.replace(':', '-')}_{self.variant.name}{rows}.json"


class AotForward:
    """Runs a step from its packages. The first call of a step loads them, or compiles and loads them.

    Under `force_eager` it calls the model's own forward instead.
    """

    def __init__(
        self, transformers_forward: TransformersForward, layers: Sequence[TracedLayer], plan: Plan, folder: Path
    ) -> None:
        """`folder`: where the packages of this plan are, or will be (`package_folder`)."""
        self._uncompiled, self._layers, self._plan, self._folder = transformers_forward, layers, plan, folder
        self._steps: dict[_StepKey, LoadedStep] = {}
        self._programs: dict[str, RunProgram] = {}
        self._constants = _constants(transformers_forward.model, layers)
        self._equal_layers: tuple[int, ...] | None = None  # see ExportedStep; None: no step was exported yet

    def __call__(self, inputs: StepInputs) -> Tensor:
        """Logits [outputs, vocab]. Raises RecompileError if the step has no package and nothing may be compiled."""
        if current_stance() == "eager":
            return self._uncompiled(inputs._replace(selects_in_last_layer=False))
        rows, inputs = inputs.rows, self._with_exported_rows(inputs)
        key = _StepKey(inputs.step.bucket, inputs.step.variant, inputs.selects_in_last_layer)
        if key not in self._steps:
            self._load(key, inputs)
        logits = self._steps[key].run({f"step/{name}": tensor for name, tensor in step_tensors(inputs).items()})[0]
        if rows is None:
            return logits
        return logits[rows] if inputs.rows is None else logits[: rows.numel()]

    def _with_exported_rows(self, inputs: StepInputs) -> StepInputs:
        """`inputs` with the `rows` that programs are exported for.

        None if the model's forward cannot select rows. A single row is repeated, because the dynamic dimension of
        `rows` has at least two elements (export.MIN_DYNAMIC_SIZE).
        """
        if inputs.rows is None or not (inputs.selects_in_last_layer or self._uncompiled.supports_logits_to_keep):
            return inputs._replace(rows=None)
        return inputs._replace(rows=inputs.rows.repeat(2)) if inputs.rows.numel() == 1 else inputs

    def _load(self, key: _StepKey, inputs: StepInputs) -> None:
        """Load a step's packages, after compiling those that are missing.

        If the last layer selects the rows, the step that selects them at the head is loaded too: `prompt_logprobs`
        uses it.
        """
        if current_stance() == "fail":
            raise RecompileError(
                f"{key.bucket.name} with variant {key.variant.name} was not loaded or compiled during start-up",
                "warm a bucket for this shape: tcdeploy warm MODEL --buckets ... --batch-sizes ...",
            )
        step_program = self._read(key)
        if step_program is None:
            step_program = self._compile(key, inputs)
        else:
            aot_counts.packages_loaded += len(set(step_program.programs) - self._programs.keys())
        for name in step_program.programs:
            if name not in self._programs:
                self._programs[name] = self._load_package(name)
        self._steps[key] = LoadedStep(step_program, self._programs, self._constants)
        if key.selects_in_last_layer:
            at_head = self._with_exported_rows(inputs._replace(selects_in_last_layer=False))
            self._load(key._replace(selects_in_last_layer=False), at_head)

    def _read(self, key: _StepKey) -> StepProgram | None:
        """The step program in the folder; None if it or one of its packages is missing."""
        path = self._folder / key.file_name
        if not path.is_file():
            return None
        step_program = parse_step_program(path.read_text())
        return step_program if all(self._package_path(name).is_file() for name in step_program.programs) else None

    def _compile(self, key: _StepKey, inputs: StepInputs) -> StepProgram:
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
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, exported in exported_step.exported.items():
            path = self._package_path(name)
            if not path.is_file():
                partial = path.with_suffix(".partial.pt2")  # a failed compilation may leave a part of the file
                compile_package(exported, str(partial), inductor_options(variant, self._plan.graphs))
                os.replace(partial, path)
                aot_counts.packages_compiled += 1
        (self._folder / key.file_name).write_text(exported_step.step_program.to_json())
        return exported_step.step_program

    def _load_package(self, name: str) -> RunProgram:
        path = self._package_path(name)
        path.open("rb").close()  # torch opens it in C++, which FileAccessTracker (cache/contents.py) does not see
        unpack_folder = self._folder.parent / UNPACK_FOLDER
        unpack_folder.mkdir(exist_ok=True)
        try:
            return load_package(str(path), 0 if self._plan.device == "cuda" else -1, str(unpack_folder))
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0]
            raise CompileError(
                f"torch cannot load the package {path.name} of {self._plan.model}: {reason}",
                "use another --cache-dir, or --programs jit",
            ) from error

    def _package_path(self, name: str) -> Path:
        return self._folder / f"{name}.pt2"


def package_folder(
    cache_dir: str, plan_key: str, sources: Mapping[str, str], torch_settings: Mapping[str, str], model: nn.Module
) -> Path:
    """The folder of a plan's packages. Its name changes with what their programs depend on."""
    package = Path(__file__).parent.parent
    own_sources = source_digests(package, [package / path for path in HASHED_FILES])
    factors = [plan_key, dict(sources), own_sources, dict(torch_settings), model_sources(model)]
    digest = hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()[:16]
    return Path(cache_dir, AOT_DIR, digest)


def _mark_dynamic_sizes(bucket: Bucket, inputs: StepInputs) -> None:
    """The number of rows of every prefill step, and the number of tokens of a dynamic bucket."""
    if inputs.rows is not None:
        mark_dynamic(inputs.rows, 0)
    prefill = inputs.step.attention_metadata.prefill
    if bucket.min_size and prefill is not None:
        for tensor, dim in ((inputs.input_ids, 1), (inputs.position_ids, 1), (prefill.slot_mapping, 0)):
            mark_dynamic(tensor, dim, min=bucket.min_size, max=bucket.size)


def _constants(model: nn.Module, layers: Sequence[TracedLayer]) -> dict[str, Tensor]:
    """Weights, buffers and KV caches by their names in a step program."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    constants: dict[str, Tensor] = {f"weight/{name}": tensor for name, tensor in tensors}
    for index, layer in enumerate(layers):
        constants |= {f"kv/{index}/k": layer.binding.k_cache, f"kv/{index}/v": layer.binding.v_cache}
    return constants
