"""The roles of a program's inputs. Passes, dependent launch (PDL) and step programs read them.

    weight   a parameter or buffer of the model; assumed not to be written by another program of the step
    state    what a layer keeps between steps: its KV cache, or tensors with a slot for each sequence
    tokens   has a dimension for the tokens of the step: hidden states, rotary factors, the slot mapping
    rows     [outputs] int64: the tokens whose outputs are returned
    step     describes the step in another way: lengths, block tables, counters
    value    any other: an output of an earlier program, or a size

A region's call says which of its tensors has which role (`RegionCall` in programs.py). In packages the names of the
inputs say it (step_program.py). The shape of a tensor does not: a weight and a state may both be matrices.

`compiling` makes them available to the passes. AOTAutograd keeps the order of a graph's inputs, but may add or merge
some, so roles are used only if the number, dtypes and shapes of the inputs are as described. Otherwise, and if the
program has subgraphs, no input has a role, and the passes that need one do nothing, which is logged.
"""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from torch import Tensor


class Role(enum.Enum):
    WEIGHT = "weight"
    STATE = "state"
    TOKENS = "tokens"
    ROWS = "rows"
    STEP = "step"
    VALUE = "value"


# The dimension of the tokens in each tensor of a step that has one, by name (`step_tensors` in model_forward.py).
TOKEN_DIMS = {"input_ids": 1, "position_ids": 1, "prefill.slot_mapping": 0}
ROLE = "tcdeploy_role"  # in the meta of a graph's inputs
CONSTANT_ROLES = {Role.WEIGHT, Role.STATE}  # the same tensors in every step
log = logging.getLogger("tcdeploy.programs")
_ROLES_BY_PREFIX = {"weight": Role.WEIGHT, "state": Role.STATE, "value": Role.VALUE}
_ROLES_BY_STEP_NAME = {"rows": Role.ROWS, **dict.fromkeys(TOKEN_DIMS, Role.TOKENS)}
_READ_BY_PASSES = {Role.WEIGHT, Role.ROWS}


def role_of_name(name: str) -> Role:
    """The role of an input of a step program, such as "weight/lm_head.weight"."""
    prefix, _, rest = name.partition("/")
    return _ROLES_BY_PREFIX.get(prefix) or _ROLES_BY_STEP_NAME.get(rest, Role.STEP)


class _Inputs(NamedTuple):
    roles: Sequence[Role]
    examples: Sequence[Any]  # tensors, which may be fake, and sizes


_compiled_inputs: ContextVar[_Inputs | None] = ContextVar("compiled_inputs", default=None)


@contextlib.contextmanager
def compiling(roles: Sequence[Role], examples: Sequence[Any]) -> Iterator[None]:
    """Within the block, a graph with inputs like `examples` is compiled, whose roles are `roles`, in order."""
    token = _compiled_inputs.set(_Inputs(roles, examples))
    try:
        yield
    finally:
        _compiled_inputs.reset(token)


def roles_of(values: Sequence[Any]) -> Sequence[Role]:
    """The role of each input of the compiled graph, given their fake values; empty if they are not as described."""
    inputs = _compiled_inputs.get()
    if inputs is None:
        return ()
    if len(values) == len(inputs.examples) and all(map(_is_alike, values, inputs.examples)):
        return inputs.roles
    log_no_roles("its graph has other inputs than its call")
    return ()


def log_no_roles(reason: str) -> None:
    """Log what the passes do not do for a program whose inputs have no roles."""
    log.info("a program has no fused one-row products, and its last layer computes all rows: %s", reason)


def compiled_roles_key() -> str:
    """What a cache key must hold, because the passes read it: the positions of weights and rows in the inputs."""
    inputs = _compiled_inputs.get()
    roles = inputs.roles if inputs is not None else ()
    return " ".join(f"{number}:{role.value}" for number, role in enumerate(roles) if role in _READ_BY_PASSES)


def _is_alike(value: Any, example: Any) -> bool:
    """Whether dtype and shape agree. A symbolic size is equal to any."""
    if not isinstance(value, Tensor) or not isinstance(example, Tensor):
        return isinstance(value, Tensor) == isinstance(example, Tensor)
    sizes = zip(value.shape, example.shape, strict=False)
    is_same_shape = value.ndim == example.ndim and all(
        first == second for first, second in sizes if isinstance(first, int) and isinstance(second, int)
    )
    return value.dtype == example.dtype and is_same_shape
