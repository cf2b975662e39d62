"""Traces the regions of a model with Dynamo, and lists graph breaks, recompilations and writes to inputs.

Dynamo traces each kind of region in real steps: prompts of several lengths, then decode steps. Its graphs are run
uncompiled, so no compiler is needed and a kind takes seconds. Unlike in a deployment, graph breaks are allowed, so that
all of them are found. So are conditions on the number of tokens, which is symbolic: code that depends on it causes a
recompilation. Dynamo's programs are discarded before each kind and phase, or another kind would count as one too.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tcdeploy.engine.check.inputs import make_timing_batch
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.errors import CompileError
from tcdeploy.explain import findings as causes
from tcdeploy.explain.findings import Finding, RegionTrace, make_finding
from tcdeploy.explain.source_line import SourceLine, current_stack, guard_line, model_line, parse_stack
from tcdeploy.kernels.attention.metadata import StepHolder
from tcdeploy.programs.programs import RegionCall, run_region
from tcdeploy.programs.regions import Region
from tcdeploy.torch_compat.dynamo import compile_trace
from tcdeploy.torch_compat.dynamo.compile_errors import is_compile_error
from tcdeploy.torch_compat.dynamo.compiled_call import get_compiled_call, set_compiled_call
from tcdeploy.torch_compat.dynamo.dispatch_mode import observe_operations
from tcdeploy.torch_compat.dynamo.mark_dynamic import suggest_dynamic, tensors_in

# In tokens, odd and even. The first length must differ from all other sizes: torch gives equal sizes one symbol.
PROMPT_LENGTHS = (23, 18, 37, 60, 13, 10)
NUM_LENGTHS = 4
DECODE_STEPS = 2
DECODE_CONTEXT = 8  # tokens
RECOMPILE_LIMIT = 256  # of a region; beyond its limit, torch runs a function uncompiled


@dataclass
class PhaseTrace:
    """The trace of one kind of region in the steps of one phase. `graphs`: number of graphs so far."""

    graphs: int = 0
    first_call_graphs: int = 0
    first_call_guards: int = 0
    is_first_step: bool = True
    called: set[nn.Module] = field(default_factory=set)
    trace: compile_trace.CompileTrace = field(default_factory=compile_trace.CompileTrace)
    error: str = ""

    def backend(self, graph: Any, example_inputs: Any) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward

    def end_call(self, module: nn.Module, recompilations: int) -> None:
        """`recompilations`: their number before the call. Those of a second call in the first step are dropped:
        a module that is called twice in a step, such as rotary factors of two kinds of layers, may need two programs.
        """
        if not self.called:
            self.first_call_graphs, self.first_call_guards = self.graphs, sum(self.trace.guard_counts)
        if self.is_first_step and module in self.called:
            del self.trace.recompilations[recompilations:]
        self.called.add(module)


def trace_regions(runner: ModelRunner, regions: Sequence[Region]) -> tuple[list[RegionTrace], list[Finding]]:
    """Trace every kind of region. The runner's steps run uncompiled afterwards. Raises CompileError."""
    if not compile_trace.supported():
        raise CompileError("this version of torch has no structured trace of compilations", "install torch 2.13")
    runner.forward = runner.transformers_forward
    for bucket in runner.plan.buckets:
        runner.run_eagerly(bucket)
    kinds: dict[str, list[Region]] = {}
    for region in regions:
        kinds.setdefault(region.kind, []).append(region)
    paths = {module: path for path, module in runner.model.named_modules()}
    traces, findings = [], []
    with runner.uncounted_steps():
        steps = _make_steps(runner)
        for kind, members in kinds.items():
            kind_steps = {"decode": steps["decode"]} if members[0].is_head else steps
            phases = {phase: trace_phase(members, runs, runner.step_holder) for phase, runs in kind_steps.items()}
            first, path = members[0], paths[members[0].module]
            graphs = {phase: trace.first_call_graphs for phase, trace in phases.items()}
            guards = {phase: trace.first_call_guards for phase, trace in phases.items()}
            recompilations = {phase: len(trace.trace.recompilations) for phase, trace in phases.items()}
            name = type(first.module).__name__
            traces.append(RegionTrace(kind, name, len(members), graphs, guards, recompilations))
            is_dynamic = any(bucket.min_size for bucket in runner.plan.buckets)
            for phase, trace in phases.items():
                findings += findings_of(trace, first, path, phase, is_dynamic)
            findings += _find_mutations(first, path, kind_steps)
    torch.compiler.reset()
    runner.row_assignment.clear()
    return traces, merge_findings(findings)


def _make_steps(runner: ModelRunner) -> dict[str, list[Callable[[], object]]]:
    """Steps to run by phase, on batches of random tokens."""
    plan = runner.plan
    bucket, rows = plan.prefill_buckets[-1], plan.decode_buckets[-1]
    longest = min(bucket.size, plan.context, (plan.kv_blocks - 1) * plan.block_size)
    lengths = [length for length in PROMPT_LENGTHS if length <= longest][:NUM_LENGTHS] or [longest]
    context = min(DECODE_CONTEXT, plan.context)
    return {
        "prefill": [make_timing_batch(runner, bucket, length).run for length in lengths],
        "decode": [make_timing_batch(runner, rows, context + step).run for step in range(DECODE_STEPS)],
    }


def trace_phase(
    members: Sequence[Region], steps: Sequence[Callable[[], object]], step_holder: StepHolder
) -> PhaseTrace:
    """Run the steps with the regions traced. If there are graph breaks, run only the first, and drop recompilations.

    torch compiles the code around a break for one size, and the functions around it on their own. This adds
    recompilations that disappear when the break is cured.
    """
    phase = PhaseTrace()
    torch.compiler.reset()
    compiled = torch.compile(run_region, backend=phase.backend, fullgraph=False, dynamic=False)

    def call_of(module: nn.Module) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            step = step_holder.step
            if step is not None and step.bucket.is_prefill:  # a decode program is for one number of rows
                for tensor, dim in RegionCall(module, step, None, args, kwargs).token_dims():
                    suggest_dynamic(tensor, dim)
            recompilations = len(phase.trace.recompilations)
            output = compiled(module, None, *args, **kwargs)
            phase.end_call(module, recompilations)
            return output

        return call

    calls = {region.module: call_of(region.module) for region in members}
    config: Any = torch.compiler.config
    limit = max(RECOMPILE_LIMIT, config.recompile_limit, config.accumulated_recompile_limit)
    raised = config.patch(recompile_limit=limit, accumulated_recompile_limit=limit)
    with _installed(calls), raised, warnings.catch_warnings(), compile_trace.collect_trace() as phase.trace:
        warnings.simplefilter("ignore")  # torch warns about some breaks, which are reported as findings
        try:
            for step in steps:
                step()
                phase.is_first_step = False
                if phase.trace.graph_breaks:
                    phase.trace.recompilations.clear()
                    break
        except Exception as error:  # of torch's compiler; some do not derive from RuntimeError
            if not is_compile_error(error):
                raise
            phase.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return phase


@contextlib.contextmanager
def _installed(calls: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Make the modules run these calls within the block."""
    earlier = {module: get_compiled_call(module) for module in calls}
    for module, call in calls.items():
        set_compiled_call(module, call)
    try:
        yield
    finally:
        for module, earlier_call in earlier.items():
            set_compiled_call(module, earlier_call)


def findings_of(trace: PhaseTrace, region: Region, path: str, phase: str, is_dynamic: bool) -> list[Finding]:
    """`is_dynamic`: whether the plan has programs with a symbolic number of tokens, which fail if it is guarded on."""
    found: list[Finding] = []
    for text in trace.trace.graph_breaks:
        frames, reason = parse_stack(text.partition("User code traceback:")[2]), causes.break_reason(text)
        cause, module = causes.classify_break(reason), _module_at(region.module, path, frames)
        heading = causes.break_heading(reason)
        found.append(make_finding("graph break", cause, region.kind, module, phase, model_line(frames), heading, True))
    for reason in trace.trace.recompilations:
        cause, line = causes.classify_guard(reason), guard_line(reason)
        module = _module_at(region.module, path, [line])
        is_blocking = is_dynamic and cause.name == "shape-guard" and phase == "prefill"
        condition = " ".join(reason.partition("#")[0].partition(": ")[2].split())
        found.append(make_finding("recompilation", cause, region.kind, module, phase, line, condition, is_blocking))
    if trace.error:
        cause, line = causes.COMPILE_ERROR, SourceLine()
        found.append(make_finding("error", cause, region.kind, path, phase, line, trace.error, True))
    return found


def _module_at(module: nn.Module, path: str, frames: Sequence[SourceLine]) -> str:
    """The path of the innermost module whose forward is in the stack."""
    spans = [(name, *_forward_span(child)) for name, child in module.named_modules()]
    for frame in reversed(frames):
        inside = [name for name, file, first, last in spans if file == frame.file and first <= frame.line <= last]
        if inside:
            return ".".join(filter(None, (path, inside[0])))
    return path


def _forward_span(module: nn.Module) -> tuple[str, int, int]:
    """File, first line and last line of a module's forward."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None:
        return "", 0, 0
    lines = [line for _, _, line in code.co_lines() if line]
    return code.co_filename, code.co_firstlineno, max(lines, default=0)


def _find_mutations(region: Region, path: str, steps: dict[str, list[Callable[[], object]]]) -> list[Finding]:
    """In-place operations on the region's inputs, in one uncompiled step of each phase."""
    found: list[Finding] = []
    storages: set[int] = set()

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        storages.update(_storage(tensor) for tensor in tensors_in((args, kwargs)))
        storages.discard(0)

    def observe(phase: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        written = _written_tensor(name, args, kwargs) if storages else None
        if written is not None and _storage(written) in storages:
            frames, cause = current_stack(), causes.INPUT_MUTATION
            module, line = _module_at(region.module, path, frames), model_line(frames)
            found.append(
                make_finding("input mutation", cause, region.kind, module, phase, line, f"aten::{name}", False)
            )

    hooks = [
        region.module.register_forward_pre_hook(enter, with_kwargs=True),
        region.module.register_forward_hook(lambda module, args, output: storages.clear(), always_call=True),
    ]
    try:
        for phase, runs in steps.items():
            with observe_operations(partial(observe, phase)):
                runs[0]()
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _written_tensor(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The tensor that an operation writes to; None if it writes to none, or is an operator of another library."""
    if isinstance(out := kwargs.get("out"), Tensor):
        return out
    writes = name.endswith("_") and not name.endswith("__")
    return args[0] if writes and args and isinstance(args[0], Tensor) else None


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def merge_findings(findings: Sequence[Finding]) -> list[Finding]:
    """One finding per cause and line of a region, blocking ones first.

    Breaks are not counted: after one, torch traces the enclosing functions too, and reports it again for each.
    """
    merged: dict[tuple[str, ...], Finding] = {}
    for finding in findings:
        location = finding.location
        reason = "" if location.file else finding.torch_reason
        key = (finding.kind, finding.cause, finding.region, location.file, str(location.line), reason)
        earlier = merged.setdefault(key, finding)
        if earlier is not finding:
            phases = tuple(dict.fromkeys((*earlier.phases, *finding.phases)))
            count = earlier.count + 1 if finding.kind == "recompilation" else 1
            blocks = earlier.is_blocking or finding.is_blocking
            merged[key] = replace(earlier, phases=phases, count=count, is_blocking=blocks)
    return sorted(merged.values(), key=lambda finding: not finding.is_blocking)
