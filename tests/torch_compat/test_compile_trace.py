"""torch's structured trace has the breaks, guards and recompilations of calls, and is written up to a size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tcdeploy.torch_compat.dynamo import compile_trace
from tcdeploy.torch_compat.dynamo.compile_trace import collect_trace, write_trace


def double_and_print(x: Tensor) -> Tensor:
    x = x * 2
    print("a break")
    return x + 1


def add_one(x: Tensor) -> Tensor:
    return x + 1


def test_breaks_and_recompilations_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    breaking = torch.compile(double_and_print, backend="eager")
    static = torch.compile(add_one, backend="eager", dynamic=False)
    with collect_trace() as trace:
        breaking(torch.ones(3))
        static(torch.ones(3))
        static(torch.ones(4))
        static(torch.ones(5))
    with collect_trace() as later:
        static(torch.ones(5))
    assert capsys.readouterr().out == "a break\n"
    assert "builtin operator `print`" in trace.graph_breaks[0]
    assert f'File "{__file__}", line' in trace.graph_breaks[0]
    sizes = [reason.partition("expected ")[2] for reason in trace.recompilations]
    assert sizes == ["3, actual 4", "4, actual 5"], "the guard of the latest program"
    assert len(trace.guard_counts) >= 4 and all(count > 0 for count in trace.guard_counts)
    assert later == compile_trace.CompileTrace()


def test_a_trace_file_ends_at_its_size(tmp_path: Path) -> None:
    def compile_and_write(name: str, max_bytes: int) -> tuple[int, int]:
        torch.compiler.reset()
        with write_trace(tmp_path / name, max_bytes) as file:
            torch.compile(add_one, backend="eager")(torch.ones(3))
        return (tmp_path / name).stat().st_size, file.num_omitted

    size, omitted = compile_and_write("whole", 1 << 20)
    assert omitted == 0 and "add_one" in (tmp_path / "whole").read_text()
    short_size, short_omitted = compile_and_write("short", 2000)
    assert 0 < short_size < size and short_omitted > 0


def test_without_the_logger_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_trace, "LOGGER", "torch._logging.moved:trace_log")
    torch.compiler.reset()
    assert not compile_trace.supported()
    with collect_trace() as trace:
        torch.compile(add_one, backend="eager")(torch.ones(3))
    assert trace == compile_trace.CompileTrace()
