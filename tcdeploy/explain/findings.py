"""What `explain` reports: regions, and findings with their costs, causes and cures. Does not import torch.

`classify_break` and `classify_guard` match torch's messages against patterns. A message that matches none is reported
as `other-break` or `other-guard` with torch's own explanation, so if a new version of torch rewords a message, the
report loses the advice, but not the line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tcdeploy.explain.source_line import SourceLine

Kind = Literal["graph break", "recompilation", "input mutation", "error"]


@dataclass(frozen=True)
class RegionTrace:
    """How regions of one kind were traced, with counts by phase.

    Recompilations are those of all modules of the kind, with several prompt lengths; not counted if there is a break.
    """

    kind: str
    type: str
    modules: int
    graphs: dict[str, int]  # of one call; 1 without graph breaks
    guards: dict[str, int]  # conditions that torch checks before it runs the programs of one call
    recompilations: dict[str, int]


@dataclass
class EagerCost:
    """Median milliseconds of one uncompiled step of a bucket, and of its parts, with their shares of the step."""

    bucket: str
    step_ms: float
    region_ms: float  # all regions of the finding's kind, which stay uncompiled until the finding is cured
    module: str
    module_ms: float | None  # those with the line, in all layers; None if it is not in a submodule of the region
    region_share: float = field(init=False)
    module_share: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.region_share = self.region_ms / self.step_ms
        self.module_share = None if self.module_ms is None else self.module_ms / self.step_ms


@dataclass(frozen=True)
class Finding:
    """One cause at one line. `is_blocking`: the region cannot be compiled until the finding is cured."""

    kind: Kind
    cause: str
    title: str
    meaning: str
    cure: str
    region: str  # kind of the region
    module: str  # path of the region's first module
    phases: tuple[str, ...]
    location: SourceLine
    torch_reason: str
    is_blocking: bool
    count: int = 1  # recompilations in all calls; other findings are not counted
    costs: tuple[EagerCost, ...] = ()


class Cause(NamedTuple):
    """`name`: stable identifier in the JSON document. `title`: for display. `pattern`: of torch's message."""

    name: str
    title: str
    meaning: str
    cure: str
    pattern: str = ""


BREAK_CAUSES = (  # the first match counts
    Cause(
        "data-dependent-branch",
        "branch on a tensor's value",
        "Python branches on a value that is known only after the tensor is computed, so a program cannot contain the "
        "branch.",
        "compute both sides and choose with torch.where, or use torch.cond; if the branch checks its input, remove it "
        "from forward",
        r"data-dependent (branching|assert)|generic_jump",
    ),
    Cause(
        "scalar-read",
        "tensor's value read by Python",
        "Python reads a number from a tensor (item, tolist, float, int), so it has to wait for the device.",
        "keep the number in a tensor, or compute it once in __init__",
        r"Tensor\.item|\.tolist|_local_scalar_dense|data.dependent operator",
    ),
    Cause(
        "data-dependent-shape",
        "size that depends on a tensor's values",
        "The size of the result depends on values of a tensor (nonzero, unique, a boolean mask), so memory cannot be "
        "planned.",
        "replace the selection by torch.where or by a mask of fixed size",
        r"dynamic shape operator|data.dependent (output|shape)",
    ),
    Cause(
        "print",
        "print or logging",
        "A program contains tensor operations only, so the text would be printed once, during tracing.",
        "remove the line, or execute it only if `not torch.compiler.is_compiling()`",
        r"builtin operator `print`|logging|logger|warnings\.warn|\bwarn_explicit\b",
    ),
    Cause(
        "disabled",
        "function that is excluded from torch.compile",
        "The function is marked with torch.compiler.disable, so it always runs uncompiled.",
        "remove torch.compiler.disable if torch can trace the function, or register the function as an operator with "
        "torch.library.custom_op",
        r"compiler\.disable|function `disable`",
    ),
    Cause(
        "untraceable-call",
        "call that torch.compile cannot trace",
        "The function is C code, an extension or a call of the operating system, and torch cannot see what it "
        "computes.",
        "register it as an operator with torch.library.custom_op and register_fake, or call it outside forward, for "
        "example in __init__",
        r"builtin operator|skip(ped)? function|marked as skipped|function call|method call|ctypes|PyCFuncPtr|pybind|"
        r"c/c\+\+|non-function|not? .*trace.*(function|method|callable)",
    ),
    Cause(
        "unsupported-python",
        "Python feature that torch.compile cannot trace",
        "torch supports most of Python in traced code, but not this construct.",
        "rewrite it with plain statements and tensor operations, or move it out of forward",
        r"context manager|generator|exception|bytecode|comprehension|import|class definition|attribute mutation|"
        r"hasattr|setattr|getattr|bad import|unsupported (type|iter)",
    ),
)
OTHER_BREAK = Cause(
    "other-break",
    "code that torch.compile cannot trace",
    "torch cannot turn this line into tensor operations.",
    "rewrite it with tensor operations, or move it out of forward",
)
GUARD_CAUSES = (
    Cause(
        "shape-guard",
        "code that depends on the number of tokens",
        "Python branches on a size, so a program is valid for some lengths only, and other lengths need further "
        "programs. Prompts are packed into one row and padded, so the code sees the length of the row, not that of the "
        "prompt, and the parity check of a start may fail.",
        "write the code so that it is right for every length without a branch, or decide once in __init__",
        r"\.size\(\)|size mismatch|\.shape\[|\.stride\(\)|duck shaping",
    ),
    Cause(
        "tensor-guard",
        "tensor with another dtype, device or layout",
        "A tensor has another dtype, device, number of dimensions or memory layout than in the first call, and each "
        "combination needs its own program.",
        "pass tensors with the same properties in all calls, for example by converting them before the layers",
        r"(dtype|device|rank|stride|requires_grad|dispatch key|conj|dynamic shape).* mismatch|tensor.* mismatch|"
        r"check_tensor|is_tensor",
    ),
    Cause(
        "global-guard",
        "global setting of torch",
        "A setting such as the grad mode, the default dtype or the number of threads has changed between two calls.",
        "set it once, before the first call",
        r"global state|grad_mode|num_threads|autocast|default_(dtype|device)|deterministic",
    ),
    Cause(
        "value-guard",
        "Python value that changes",
        "The program contains this number, string or object as a constant. Modules or calls with another value need "
        "their own programs.",
        "keep the value in a tensor (register_buffer), or make it equal in all layers",
        r"==|\bis\b|___check_|len\(|\bin\b|type_id|hasattr",
    ),
)
OTHER_GUARD = Cause(
    "other-guard",
    "condition that does not hold for all calls",
    "torch specialised the program on a condition of the first call that was false in a later one.",
    "change the code so that the condition holds in all calls",
)
INPUT_MUTATION = Cause(
    "input-mutation",
    "write to an input of the region, or to a view of it",
    "The write changes the caller's tensor. A program computes a new tensor and then copies it back, which is one more "
    "pass over the tensor in each layer. torch's CUDA graphs (--graphs region) skip such a program.",
    "compute a new tensor (x = x * y, torch.where, torch.cat), or write to x.clone()",
)
COMPILE_ERROR = Cause(
    "compile-error",
    "torch.compile fails",
    "torch could not compile the regions, or the results of the programs differ from those of the model.",
    "read torch's message; TCDEPLOY_DEBUG=1 shows the traceback",
)


EXAMPLES = re.compile(r"\(e\.g\.[^)]*\)")  # in torch's explanations
REASON = re.compile(
    r"Graph Break Reason: (?P<reason>.*?)(?=\n\nUser code traceback|\nUser code traceback|\Z)", re.DOTALL
)
EXPLANATION = re.compile(
    r"^(?P<heading>[^\n]+)\n +Explanation: (?P<explanation>.+?)(?=\n +\w[^\n]*: |\n\n|\Z)", re.M | re.S
)


def classify_break(reason: str) -> Cause:
    """`reason`: the result of `break_reason`."""
    heading = EXAMPLES.sub("", break_heading(reason))
    return next((cause for cause in BREAK_CAUSES if re.search(cause.pattern, heading, re.I)), OTHER_BREAK)


def classify_guard(reason: str) -> Cause:
    condition = reason.partition("#")[0]
    return next((cause for cause in GUARD_CAUSES if re.search(cause.pattern, condition, re.I)), OTHER_GUARD)


def break_reason(text: str) -> str:
    """torch's reason for a break, without the stack that follows it."""
    match = REASON.search(text)
    return (match["reason"] if match else text).strip()


def break_heading(reason: str) -> str:
    """torch's heading and explanation of a break, on one line. A reason without them: its last line."""
    if match := EXPLANATION.search(reason):
        return " ".join(f"{match['heading']}: {match['explanation']}".split())
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def make_finding(
    kind: Kind, cause: Cause, region: str, module: str, phase: str, location: SourceLine, reason: str, is_blocking: bool
) -> Finding:
    return Finding(kind, *cause[:4], region, module, (phase,), location, reason, is_blocking)
