"""Runs steps from ahead-of-time compiled packages, without torch's compiler and without modelling code.

    aot/KEY/prefill-512_default.json   the calls of a step (step_program.py)
    aot/KEY/0123456789abcdef.pt2       a program, which several steps may share
    aot/.unpacked/                     the libraries of loaded packages, in the staging folder of a start only

A step program holds the dtype, shape and strides of each input, and `LoadedStep` checks them before it calls a package.
programs/aot.py describes KEY, and compiles packages that are missing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from tcdeploy.errors import CompileError, RecompileError
from tcdeploy.planning.plan import Bucket, Plan
from tcdeploy.planning.variants import Variant
from tcdeploy.programs import compile_stats
from tcdeploy.programs.model_forward import StepInputs, step_tensors
from tcdeploy.programs.stances import current_stance
from tcdeploy.programs.step_program import LoadedStep, RunProgram, StepProgram, parse_step_program
from tcdeploy.torch_compat.inductor.aot_package import load_package

UNPACK_FOLDER = ".unpacked"  # in the staging folder, which is removed when the process ends


class MissingPackageError(Exception):
    """A step has no package, and this process cannot compile one. `prepare` then starts with the compiler."""


class StepProgramKey(NamedTuple):
    """What identifies a step program."""

    bucket: Bucket
    variant: Variant
    selects_in_last_layer: bool

    @property
    def file_name(self) -> str:
        """Without a dot before the suffix: files of one stem are kept together (cache/files/usage.py)."""
        rows = "_rows-in-last-layer" if self.selects_in_last_layer else ""
        return f"{self.bucket.name.replace(':', '-')}_{self.variant.name}{rows}.json"


class PackagedForward:
    """Runs a step from its packages. The first call of a step loads them."""

    def __init__(
        self, constants: Mapping[str, Tensor], supports_logits_to_keep: bool, plan: Plan, folder: Path
    ) -> None:
        """`constants`: weights, buffers and states by their names in a step program.

        `supports_logits_to_keep`: whether the model's forward can select rows at the head.
        """
        self.constants, self.supports_logits_to_keep = constants, supports_logits_to_keep
        self.folder, self._plan = folder, plan
        self._steps: dict[StepProgramKey, LoadedStep] = {}
        self._programs: dict[str, RunProgram] = {}
        self.foreign_ops: set[str] = set()  # as in StepProgram, of all steps that were loaded

    def __call__(self, inputs: StepInputs) -> Tensor:
        """Logits [outputs, vocab].

        Raises RecompileError (not loaded during start-up), MissingPackageError, CompileError (torch cannot load it).
        """
        rows, inputs = inputs.rows, self._with_exported_rows(inputs)
        key = StepProgramKey(inputs.step.bucket, inputs.step.variant, inputs.selects_in_last_layer)
        if key not in self._steps:
            self._load(key, inputs)
        tensors = {f"step/{name}": tensor for name, tensor in step_tensors(inputs).items()}
        logits = self._steps[key].run(tensors, inputs.step.before_program)[0]
        if rows is None:
            return logits
        return logits[rows] if inputs.rows is None else logits[: rows.numel()]

    def _with_exported_rows(self, inputs: StepInputs) -> StepInputs:
        """`inputs` with the `rows` that programs are exported for; None if the model's forward cannot select rows.

        A single row is repeated, because dynamic dimensions have at least two elements (export.MIN_DYNAMIC_SIZE).
        """
        if inputs.rows is None or not (inputs.selects_in_last_layer or self.supports_logits_to_keep):
            return inputs._replace(rows=None)
        return inputs._replace(rows=inputs.rows.repeat(2)) if inputs.rows.numel() == 1 else inputs

    def _load(self, key: StepProgramKey, inputs: StepInputs) -> None:
        """Load a step's packages; with rows selected in the last layer, also the step for `prompt_logprobs`."""
        if current_stance() == "fail":
            raise RecompileError(
                f"{key.bucket.name} with variant {key.variant.name} was not loaded or compiled during start-up",
                "warm a bucket for this shape: tcdeploy warm MODEL --buckets ... --batch-sizes ...",
            )
        step_program = self._read(key)
        if step_program is None:
            step_program = self._make(key, inputs)
        else:
            compile_stats.packages_loaded += len(set(step_program.programs) - self._programs.keys())
        for name in step_program.programs:
            if name not in self._programs:
                self._programs[name] = self._load_package(name)
        self.foreign_ops.update(step_program.foreign_ops)
        self._steps[key] = LoadedStep(step_program, self._programs, self.constants)
        if key.selects_in_last_layer:
            at_head = self._with_exported_rows(inputs._replace(selects_in_last_layer=False))
            self._load(key._replace(selects_in_last_layer=False), at_head)

    def _make(self, key: StepProgramKey, inputs: StepInputs) -> StepProgram:
        """The step program of a step whose packages are missing."""
        raise MissingPackageError(f"{key.bucket.name} has no packages for variant {key.variant.name}")

    def _read(self, key: StepProgramKey) -> StepProgram | None:
        """The step program in the folder; None if it or one of its packages is missing."""
        path = self.folder / key.file_name
        if not path.is_file():
            return None
        step_program = parse_step_program(path.read_text())
        return step_program if all(self.package_path(name).is_file() for name in step_program.programs) else None

    def _load_package(self, name: str) -> RunProgram:
        path = self.package_path(name)
        path.open("rb").close()  # torch opens it in C++, which FileAccessTracker (cache/files/usage.py) does not see
        unpack_folder = self.folder.parent / UNPACK_FOLDER
        unpack_folder.mkdir(exist_ok=True)
        try:
            return load_package(str(path), 0 if self._plan.device == "cuda" else -1, str(unpack_folder))
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0]
            hint = "use another --cache-dir, or --programs jit"
            if os.statvfs(unpack_folder).f_flag & os.ST_NOEXEC:
                reason += " (the file system is mounted with noexec)"
                hint = "set --cache-dir, or TMPDIR if the cache folder is read-only, to a folder without noexec"
            raise CompileError(
                f"torch cannot load the package {path.name} of {self._plan.model}: {reason}", hint
            ) from error

    def package_path(self, name: str) -> Path:
        return self.folder / f"{name}.pt2"
