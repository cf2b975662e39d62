"""The table of programs, and the wrappers through which the model's modules call it.

Each region is compiled in place: its module calls the table's program for (region kind, bucket, variant). A `Loader`
makes the programs (`JitLoader` in programs/jit.py). With `--programs aot`, programs/aot.py runs whole steps from
packages instead. engine/step/step_graphs.py captures whole steps as CUDA graphs, so Inductor's own are off unless
`--graphs region` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeAlias

from torch import Tensor, nn

from tcdeploy.kernels.attention.metadata import Step, StepHolder
from tcdeploy.planning.plan import Bucket
from tcdeploy.planning.variants import Variant
from tcdeploy.programs.regions import Region
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
            # Uncompiled code makes the tensors before the region, so its call is the first place that sees them.
            # PrefillBuffers marks the number of selected rows.
            if bucket_min := step.bucket.min_size:
                for tensor, dim in token_dims(step, args, kwargs):
                    mark_dynamic(tensor, dim, min=bucket_min, max=step.bucket.size)
            return table[ProgramKey(kind, step.bucket, step.variant)](module, rows, *args, **kwargs)

        return call

    for region in regions:
        set_compiled_call(region.module, call_of(region))


def _is_compiled(region: Region, step: Step) -> bool:
    """Whether the region is compiled in this step. Head modules, which take microseconds, are in decode only."""
    is_chosen = not region.is_head or (not step.bucket.is_prefill and step.variant.compile_head)
    return step.is_compiled and is_chosen


def token_dims(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Tensor, int]]:
    """(tensor, dim) of each region input that is sized by tokens: shape [1, tokens, ...], and the slot mapping."""
    for item in tensors_in((args, kwargs)):
        if item.ndim >= 2 and item.shape[0] == 1:
            yield item, 1
    if step.attention_metadata.prefill is not None:
        yield step.attention_metadata.prefill.slot_mapping, 0


def run_region(module: nn.Module, rows: Tensor | None, *args: Any, **kwargs: Any) -> Any:
    """The function that is compiled. The module is an argument, so that all layers of a kind share a program.

    It has to be a function of this package: torch does not compile the frames of its own modules, and the LM head is a
    plain nn.Linear.
    """
    output = run_uncompiled(module, *args, **kwargs)
    return output if rows is None else output[:, rows]
