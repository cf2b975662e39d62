"""Rows of a profile add up to the step, largest first."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile

from tcdeploy.bench.breakdown import KernelRun
from tcdeploy.cli.explain_display import kernels_table
from tcdeploy.explain.kernels import (
    BETWEEN,
    GAPS,
    PROGRAMS,
    STEP,
    Operation,
    named_cpp_kernels,
    summarize_kernels,
    summarize_operations,
)


def test_gaps_and_overlapping_kernels_are_counted_once() -> None:
    replay = [
        KernelRun("gemm", 10, 16),
        KernelRun("norm", 14, 18),
        KernelRun("gemm", 20, 30),
    ]  # norm starts before gemm ends
    result = summarize_kernels("decode:1", [replay, replay])
    assert [(row.name, row.us, row.count) for row in result.kernels] == [
        ("gemm", 16, 2), ("norm", 2, 1), (GAPS, 2, 1)
    ]  # fmt: skip
    assert result.step_us == 20 and sum(row.share for row in result.kernels) == pytest.approx(1)


def test_operations_of_torch_compile_have_names_that_can_be_read() -> None:
    operations = [
        Operation(STEP, 30.0), Operation("## Call CompiledFxGraph f5mgw6 ##", 50.0), Operation("aten::mm", 80.0),
        Operation("## Call CompiledFxGraph abcdef ##", 20.0), Operation("aten::mm", 20.0),
    ]  # fmt: skip
    result = summarize_operations("decode:1", operations, replays=2)
    assert [(row.name, row.us, row.count, row.share) for row in result.kernels] == [
        ("aten::mm", 50.0, 1, 0.5), (PROGRAMS, 35.0, 1, 0.35), (BETWEEN, 15.0, 0.5, 0.15)
    ]  # fmt: skip
    assert result.step_us == 100.0


def test_kernels_of_a_program_are_named_within_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    program: Any = ModuleType("program")
    program.AsyncCompile, program.cpp_fused_add_0, program.call = object, lambda x: x + 1, print
    kernel = program.cpp_fused_add_0
    monkeypatch.setitem(sys.modules, "program", program)
    with named_cpp_kernels():
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            assert program.cpp_fused_add_0(1) == 2
        assert program.call is print
    assert program.cpp_fused_add_0 is kernel
    assert "cpp_fused_add_0" in {event.name for event in profiled.events() or ()}


def test_a_long_table_sums_up_its_smallest_rows() -> None:
    kernels = summarize_operations("decode:1", [Operation(f"aten::op{number}", 1.0) for number in range(50)], 1)
    rows = kernels_table(kernels).rows
    assert [rows[-2][0], rows[-2][2]] == ["30 others", "30.0"] and list(rows[-1])[2:] == ["50.0", "100.0%"]
