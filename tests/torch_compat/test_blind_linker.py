"""Programs link against the stub of libcuda, and load by the driver's name."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tcdeploy.errors import UsageError
from tcdeploy.torch_compat.blind import linker


@pytest.fixture
def cuda_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the names of all headers."""
    for header in linker.HEADERS:
        path = tmp_path / "cuda" / "include" / header
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("LIBRARY_PATH", "/elsewhere")
    monkeypatch.setattr(linker.sysconfig, "get_path", lambda name: str(tmp_path))  # wheels of CUDA may have the headers
    return tmp_path / "cuda"


def test_a_program_that_calls_the_driver_names_its_library(cuda_home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stub"
    folder.mkdir()
    linker.prepare_linking(folder, "13.0")
    program = tmp_path / "program.so"
    source = "int cuLaunchKernel(void); int launch(void) { return cuLaunchKernel(); }"
    flags = ["-shared", "-fPIC", "-Wl,--as-needed", "-x", "c", "-", "-x", "none", "-lcuda", "-o", str(program)]
    subprocess.run(["gcc", *flags], input=source.encode(), check=True)
    headers = subprocess.run(["objdump", "-p", str(program)], capture_output=True, text=True, check=True).stdout
    assert "NEEDED               libcuda.so.1" in headers
    assert (folder / "libcuda.so.1").is_file()


def test_missing_headers_are_named_with_their_packages(cuda_home: Path, tmp_path: Path) -> None:
    (cuda_home / "include" / "nv" / "target").unlink()
    with pytest.raises(UsageError, match=r"lacks nv/target") as caught:
        linker.prepare_linking(tmp_path, "13.0")
    assert "nvidia-cuda-cccl==13.*" in caught.value.hint
