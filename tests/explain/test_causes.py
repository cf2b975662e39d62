"""Causes are recognised by torch's texts, here as torch 2.13 wrote them."""

from __future__ import annotations

import pytest

from tcdeploy.explain.findings import break_heading, break_reason, classify_break, classify_guard

BREAK = """Graph break in user code at /models/modeling_x.py:23
Graph Break Reason: Encountered graph break when attempting to trace CALL: a function call, e.g. f(x, y):

{heading}
  Explanation: {explanation}
  Hint: This graph break is fundamental.

  Developer debug context: call_method TensorVariable() item () {{}}

 For more details about this graph break, please visit: https://meta-pytorch.github.io/site/gb/gb0124.html

User code traceback:
  File "/models/modeling_x.py", line 23, in forward
    print(x)
"""


@pytest.mark.parametrize(
    ("cause", "heading", "explanation"),
    [
        (
            "data-dependent-branch",
            "Data-dependent branching",
            "Detected data-dependent branching (e.g. `if my_tensor.sum() > 0:`). Dynamo does not support tracing "
            "dynamic control flow.",
        ),
        (
            "scalar-read",
            "Unsupported Tensor.item() call with capture_scalar_outputs=False",
            "Dynamo does not support tracing `Tensor.item()` with config.capture_scalar_outputs=False.",
        ),
        (
            "data-dependent-shape",
            "Dynamic shape operator",
            "Operator `aten.nonzero.default`'s output shape depends on input Tensor data.",
        ),
        (
            "print",
            "Failed to trace builtin operator",
            "Dynamo does not know how to trace builtin operator `print` with argument types ['str'] (has_kwargs False)",
        ),
        (
            "untraceable-call",
            "Failed to trace builtin operator",
            "Dynamo does not know how to trace builtin operator `open` with argument types ['str'] (has_kwargs False)",
        ),
        (
            "untraceable-call",
            "Attempted to call function marked as skipped",
            "Dynamo does not know how to trace the builtin `fast_norm.PyCapsule.forward.` This function is either a "
            "Python builtin (e.g. _warnings.warn) or a third-party C/C++ Python extension (perhaps created with "
            "pybind).",
        ),
        (
            "disabled",
            "Skip calling `torch.compiler.disable()`d function",
            "Skip calling function `<function relu>` since it was wrapped with `torch.compiler.disable` (reason: None)",
        ),
        (
            "unsupported-python",
            "Unsupported context manager",
            "Dynamo does not know how to enter a `lock` context manager.",
        ),
        ("other-break", "Something new", "torch 3 does not know it."),
    ],
)
def test_a_break_is_classified_by_its_heading(cause: str, heading: str, explanation: str) -> None:
    reason = break_reason(BREAK.format(heading=heading, explanation=explanation))
    assert break_heading(reason) == f"{heading}: {explanation}"
    assert classify_break(reason).name == cause


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (
            "shape-guard",
            "0/0: (x.size()[1] % 2) == 0  # if x.shape[1] % 2:  # s/modeling_x.py:23 in forward (a.py:1 in b)",
        ),
        ("shape-guard", "0/0: tensor 'x' size mismatch at index 1. expected 4, actual 6"),
        ("tensor-guard", "0/0: tensor 'x' dtype mismatch. expected Float, actual BFloat16"),
        ("tensor-guard", "0/0: tensor 'x' stride mismatch at index 0. expected 8, actual 16"),
        ("value-guard", "0/0: module._modules['mlp'].scale == 0.1  # x * self.scale  # s/modeling_x.py:9 in forward"),
        ("value-guard", "0/0: not hasattr(module._modules['mlp'], 'n')"),
        ("global-guard", "0/0: GLOBAL_STATE changed: grad_mode"),
        ("other-guard", "0/0: unknown"),
    ],
)
def test_a_guard_is_classified_by_its_condition(cause: str, reason: str) -> None:
    assert classify_guard(reason).name == cause
