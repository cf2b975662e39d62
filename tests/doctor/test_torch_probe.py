"""The process that imports torch: what it reports, and what is known if it crashes, hangs or cannot start."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

import pytest

from tcdeploy.doctor.torch_probe import COMMAND, SECTIONS, run_torch_probe
from tcdeploy.planning.environment import installed_flash_packages


def test_the_process_describes_this_machine() -> None:
    probe = run_torch_probe()
    assert (probe.failure, dict(probe.errors)) == ("", {}) and list(probe.sections) == list(SECTIONS)
    environment = probe.environment
    assert environment is not None and environment.torch == probe.sections["torch"]["version"]
    assert environment.transformers == probe.sections["transformers"] == importlib.metadata.version("transformers")
    assert environment.flash_packages == installed_flash_packages()
    assert len(environment.gpus) == len(probe.sections["gpus"]["gpus"])
    assert probe.sections["cache keys"]["sources"]["kernels/linear/ops.py"]
    assert "torch" not in COMMAND.replace("torch_probe", "")


@pytest.mark.parametrize(
    ("source", "seconds", "failure"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", 100.0, "was ended by signal SIGSEGV (at: torch)"),
        ("import os; os.write(2, b'no room'); os._exit(3)", 101.0, "exited with status 3: no room (at: torch)"),
        (
            'print(\'{"section": "torch"}\'); raise SystemExit(4)',
            102.0,
            'exited with status 4: {"section": "torch"} (at: torch)',
        ),
    ],
)
def test_a_process_that_does_not_finish_has_reported_what_it_found(
    source: str, seconds: float, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time limits differ because results are kept per limit. What torch prints is no section."""
    (tmp_path / "torch.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probe = run_torch_probe(seconds)
    assert probe.failure.endswith(failure)
    assert list(probe.sections) == ["driver"] and not probe.errors
    assert probe.reason("environment") == probe.failure
    assert probe.fails("torch") and not probe.fails("gpus")


def test_a_process_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    source = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    (tmp_path / "torch.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probe = run_torch_probe(6.0)
    assert probe.failure.endswith("did not finish within 6 s (at: torch)") and list(probe.sections) == ["driver"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_an_exception_of_one_section_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    (tmp_path / "torch.py").write_text("raise ValueError('first line\\nsecond line')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    probe = run_torch_probe(103.0)
    assert probe.failure == "" and probe.reason("torch") == "ValueError: first line"
    assert {"driver", "uncompiled"} <= set(probe.sections)
    assert not (tmp_path / "__pycache__").exists(), "the process must not write the bytecode that it reports as missing"


def test_a_python_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    probe = run_torch_probe(104.0)
    assert probe.failure == "Python cannot be started: No such file or directory"
