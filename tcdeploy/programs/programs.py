"""The table of programs, and the wrappers through which the model's modules call it.

Each region is compiled in place: its module calls the table's program for (region kind, bucket, variant). A `Loader`
makes the programs (`JitLoader` in programs/jit.py). With `--programs aot`, programs/aot.py runs whole steps from
packages instead. engine/step/step_graphs.py captures whole steps as CUDA graphs, so Inductor's own are off unless
`--graphs region` is set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor, nn

from tcdeploy.kernels.attention.metadata import Step, StepHolder
from tcdeploy.kernels.state.layer_state import LayerBinding
from tcdeploy.planning.plan import Bucket
from tcdeploy.planning.variants import Variant
from tcdeploy.programs.model_forward import metadata_tensors
from tcdeploy.programs.regions import Region
from tcdeploy.programs.roles import TOKEN_DIMS, Role
from tcdeploy.torch_compat.dynamo.compiled_call import run_uncompiled, set_compiled_call
from tcdeploy.torch_compat.dynamo.mark_dynamic import mark_dynamic, tensors_in

# program(module, rows, *args, **kwargs): the module's output, reduced to `rows` [outputs] int64 if they are not None.
Program: TypeAlias = Callable[..., Any]
LAST_ROWS = ":rows"  # marks the kind of a region that returns only the sampled rows


class ProgramKey(NamedTuple):
    """What identifies a program. Two keys may share compiled code, which is up to the loader."""

    kind: str
    bucket: Bucket
    variant: Variant


class Loader(Protocol):
    def load(self, key: ProgramKey) -> Program: ...


class ProgramTable(dict[ProgramKey, Program]):
    """Programs by key. Each is loaded when it is first called, during warm-up."""

    def __init__(self, loader: Loader) -> None:
        super().__init__()
        self._loader = loader

    def __missing__(self, key: ProgramKey) -> Program:
        program = self[key] = self._loader.load(key)
        return program


def compile_in_place(regions: list[Region], table: ProgramTable, step_holder: StepHolder) -> None:
    """Make each region's module call its program of the running step. Without a step the modules run uncompiled."""

    def call_of(region: Region) -> Callable[..., Any]:
        module = region.module

        def call(*args: Any, **kwargs: Any) -> Any:
            step = step_holder.step
            if step is None or not _is_compiled(region, step):
                return run_uncompiled(module, *args, **kwargs)
            step.before_program()
            rows = step.last_token_rows if region.is_last else None
            kind = region.kind if rows is None else region.kind + LAST_ROWS
            region_call = RegionCall(module, step, rows, args, kwargs)
            # Uncompiled code makes the tensors before the region, so its call is the first place that sees them.
            # PrefillBuffers marks the number of selected rows.
            if bucket_min := step.bucket.min_size:
                for tensor, dim in region_call.token_dims():
                    mark_dynamic(tensor, dim, min=bucket_min, max=step.bucket.size)
            with running(region_call):
                return table[ProgramKey(kind, step.bucket, step.variant)](module, rows, *args, **kwargs)

        return call

    for region in regions:
        set_compiled_call(region.module, call_of(region))


def _is_compiled(region: Region, step: Step) -> bool:
    """Whether the region is compiled in this step. Head modules, which take microseconds, are in decode only."""
    is_chosen = not region.is_head or (not step.bucket.is_prefill and step.variant.compile_head)
    return step.is_compiled and is_chosen


class RegionCall(NamedTuple):
    """A call of a region in a step, whose tensors have the roles of roles.py."""

    module: nn.Module
    step: Step
    rows: Tensor | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def token_dims(self) -> Iterator[tuple[Tensor, int]]:
        """(tensor, dim) of each input that is sized by the step's tokens.

        They are the arguments of shape [1, tokens, ...], and the tensors of the step in TOKEN_DIMS.
        """
        tensors = metadata_tensors(self.step.attention_metadata)
        sized = tensors.get("prefill.slot_mapping", tensors.get("decode.seq_lens"))
        for item in tensors_in((self.args, self.kwargs)):
            if sized is not None and tuple(item.shape[:2]) == (1, sized.shape[0]):
                yield item, 1
        yield from ((tensors[name], dim) for name, dim in TOKEN_DIMS.items() if name in tensors)

    def roles(self, inputs: Sequence[object]) -> list[Role]:
        """The role of each input of the region's graph. Tensors are compared by identity."""
        bindings = [getattr(module, "tcdeploy", None) for module in self.module.modules()]
        layers = [binding for binding in bindings if isinstance(binding, LayerBinding)]
        roles = {
            **_by_id(metadata_tensors(self.step.attention_metadata).values(), Role.STEP),
            **_by_id((tensor for tensor, _ in self.token_dims()), Role.TOKENS),
            **_by_id([] if self.rows is None else [self.rows], Role.ROWS),
            **_by_id((*self.module.parameters(), *self.module.buffers()), Role.WEIGHT),
            **_by_id((tensor for layer in layers for tensor in layer.state), Role.STATE),
        }
        return [roles.get(id(item), Role.VALUE) for item in inputs]


def _by_id(tensors: Iterable[Tensor], role: Role) -> dict[int, Role]:
    return {id(tensor): role for tensor in tensors}


_running_call: ContextVar[RegionCall | None] = ContextVar("running_call", default=None)


@contextlib.contextmanager
def running(region_call: RegionCall) -> Iterator[None]:
    """Within the block, `roles_of_call` describes the inputs of this call."""
    token = _running_call.set(region_call)
    try:
        yield
    finally:
        _running_call.reset(token)


def roles_of_call(inputs: Sequence[object]) -> list[Role]:
    """The roles of the inputs of a graph that is compiled during a region's call; all `VALUE` outside of one."""
    region_call = _running_call.get()
    return [Role.VALUE] * len(inputs) if region_call is None else region_call.roles(inputs)


def run_region(module: nn.Module, rows: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """The function that is compiled. The module is an argument, so that all layers of a kind share a program.

    It has to be a function of this package: torch does not compile the frames of its own modules, and the LM head is a
    plain nn.Linear.
    """
    output = run_uncompiled(module, *args, **kwargs)
    return output if rows is None else output[:, rows]
