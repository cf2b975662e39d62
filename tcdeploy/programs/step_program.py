"""A step as a list of calls of ahead-of-time compiled programs, with names for the tensors between them.

    weight/PATH        a parameter or buffer of the model
    state/LAYER/NAME   what a layer keeps between steps: its KV cache (k, v), or a tensor in slots
    step/NAME          an input of the step: input_ids, position_ids, rows, prefill.slot_mapping, ...
    value/NUMBER       an output of an earlier call

The names say the roles of the tensors (roles.py). A program is an AOTInductor package whose inputs are listed by the
call, weights included, so all layers of a kind share one program. Running a step needs neither transformers nor torch's
compiler.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from tcdeploy.errors import MismatchError
from tcdeploy.host.typed_json import from_json
from tcdeploy.planning.dtypes import dtype_name
from tcdeploy.programs.roles import CONSTANT_ROLES, Role, role_of_name

HINT = "pass another --cache-dir, so that all programs are compiled again for this model"
RunProgram: TypeAlias = Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class InputSpec:
    """What a program requires of an input. None in `shape`: a dynamic size. `strides`: None if it is contiguous."""

    dtype: str  # "float32", as torch names it
    shape: tuple[int | None, ...]
    strides: tuple[int, ...] | None = None

    def mismatch(self, tensor: Tensor) -> str | None:
        """How `tensor` differs, or None if it fits."""
        dtype = dtype_name(tensor.dtype)
        fits = tensor.ndim == len(self.shape) and all(
            size in (None, actual) for size, actual in zip(self.shape, tensor.shape, strict=True)
        )
        strides = None if tensor.is_contiguous() else tensor.stride()
        if fits and dtype == self.dtype and strides == self.strides:
            return None
        shape = ", ".join("any" if size is None else str(size) for size in self.shape)
        return (
            f"{_describe(strides)} {dtype} {list(tensor.shape)} instead of "
            f"{_describe(self.strides)} {self.dtype} [{shape}]"
        )


@dataclass(frozen=True)
class ProgramCall:
    """One call of a program: the names of its inputs and outputs, in the program's order."""

    program: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class StepProgram:
    """The calls of a step, in order."""

    calls: tuple[ProgramCall, ...]
    logits: str  # the name of the result
    inputs: dict[str, tuple[InputSpec, ...]]  # by program
    foreign_ops: tuple[str, ...] = ()  # of other libraries, which must be imported to run the programs

    @property
    def programs(self) -> tuple[str, ...]:
        """The names of the programs, each once, in the order of their first calls."""
        return tuple(dict.fromkeys(call.program for call in self.calls))

    def last_uses(self) -> list[list[str]]:
        """For each call, the values whose last use is this call. The logits are not among them."""
        last = {name: number for number, call in enumerate(self.calls) for name in (*call.outputs, *call.inputs)}
        last.pop(self.logits, None)
        uses: list[list[str]] = [[] for _ in self.calls]
        for name, number in last.items():
            if role_of_name(name) is Role.VALUE:
                uses[number].append(name)
        return uses

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)


def parse_step_program(text: str) -> StepProgram:
    """The inverse of `to_json`. Raises ValueError if `text` is not a step program."""
    return from_json(StepProgram, json.loads(text), "the step program")


class LoadedStep:
    """A step program with its loaded packages and the tensors that are the same in every step."""

    def __init__(
        self, step_program: StepProgram, programs: Mapping[str, RunProgram], constants: Mapping[str, Tensor]
    ) -> None:
        """`constants`: weights and states by name. Raises MismatchError if one does not fit its program."""
        self._step_program, self._programs = step_program, programs
        names = {name for call in step_program.calls for name in call.inputs}
        missing = {name for name in names if role_of_name(name) in CONSTANT_ROLES} - constants.keys()
        if missing:
            raise MismatchError(f"the model has no {min(missing)}, which a compiled program needs", HINT)
        self._constants = {name: tensor for name, tensor in constants.items() if name in names}
        self._last_uses = step_program.last_uses()
        self._checked: set[tuple[torch.Size, ...]] = set()  # shapes of step inputs that fit
        self._check_inputs(self._constants)

    def run(self, step_inputs: Mapping[str, Tensor], before_program: Callable[[], None]) -> Tensor:
        """Logits [1, outputs, vocab]. Raises MismatchError if an input does not fit its program.

        `before_program`: as in `Step`.
        """
        shapes = tuple(tensor.shape for tensor in step_inputs.values())
        if shapes not in self._checked:  # AOTInductor does not check: a wrong shape would be read out of bounds
            self._check_inputs(step_inputs)
            self._checked.add(shapes)
        values = {**self._constants, **step_inputs}
        for call, last_used in zip(self._step_program.calls, self._last_uses, strict=True):
            before_program()
            outputs = self._programs[call.program]([values[name] for name in call.inputs])
            values.update(zip(call.outputs, outputs, strict=True))
            del outputs
            for name in last_used:
                del values[name]
        return values[self._step_program.logits]

    def _check_inputs(self, tensors: Mapping[str, Tensor]) -> None:
        for call in self._step_program.calls:
            for name, spec in zip(call.inputs, self._step_program.inputs[call.program], strict=True):
                if name in tensors and (mismatch := spec.mismatch(tensors[name])):
                    raise MismatchError(f"an input of a compiled program, {name}, is {mismatch}", HINT)


def _describe(strides: tuple[int, ...] | None) -> str:
    return "contiguous" if strides is None else f"strided {list(strides)}"
