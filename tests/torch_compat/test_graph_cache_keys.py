"""A program's cache key does not depend on the other modules of the process."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, TINY, TINY_FLAGS, cli_environment

PRINT_KEYS = """
import hashlib
import torch
from torch._inductor.codecache import FxGraphCachePickler

def key():
    graph = torch.fx.symbolic_trace(torch.nn.ReLU())
    return hashlib.sha256(FxGraphCachePickler(graph).dumps(torch.contiguous_format)).hexdigest()

torch_key = key()
from tcdeploy.torch_compat.inductor.graph_cache_keys import pickle_memory_formats_by_name
pickle_memory_formats_by_name()
print(torch_key, key())
"""
OTHER_MODULE = """
def load():
    global torch
    import torch
"""  # precedes torch in sys.modules, and has an attribute `torch`
IMPORT_OTHER_MODULE = "import other_server; other_server.load()\n"


def run(folder: Path, program: str, *arguments: str) -> str:
    """The program's stdout. It can import the modules in `folder`."""
    environ = cli_environment(folder, PYTHONPATH=f"{ROOT}:{folder}")
    result = subprocess.run([sys.executable, "-c", program, *arguments], env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.long  # what the keys are for, a hit, is tested below
def test_torch_s_key_depends_on_the_importer_of_torch_and_the_patched_key_does_not(tmp_path: Path) -> None:
    """If the first assertion fails, torch no longer needs tcdeploy/torch_compat/inductor/graph_cache_keys.py."""
    (tmp_path / "other_server.py").write_text(OTHER_MODULE)
    (torch_key, patched_key), (other_torch_key, other_patched_key) = (
        run(tmp_path, program).split() for program in (PRINT_KEYS, IMPORT_OTHER_MODULE + PRINT_KEYS)
    )
    assert torch_key != other_torch_key
    assert patched_key == other_patched_key


def test_a_program_with_other_imports_hits_a_cache_that_another_importer_of_torch_filled(
    tmp_path: Path, filled_cache: Path
) -> None:
    """The cache was filled by a fork of tests/fork_server.py, whose first importer of torch is another module."""
    (tmp_path / "other_server.py").write_text(OTHER_MODULE)
    cache = shutil.copytree(filled_cache, tmp_path / "cache")
    program = f"{IMPORT_OTHER_MODULE}from tcdeploy.cli.app import main; main()"
    run(tmp_path, program, "warm", TINY, *TINY_FLAGS, "--cache-dir", str(cache), "--require-hit")
