"""A program's key is the same, whatever else was imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, TINY, cli_environment

KEYS = """
import hashlib
import torch
from torch._inductor.codecache import FxGraphCachePickler

def key():
    graph = torch.fx.symbolic_trace(torch.nn.ReLU())
    return hashlib.sha256(FxGraphCachePickler(graph).dumps(torch.contiguous_format)).hexdigest()

torchs = key()
from tcdeploy.torch_compat.graph_cache_keys import pickle_memory_formats_by_name
pickle_memory_formats_by_name()
print(torchs, key())
"""
LATE = """
def load():
    global torch
    import torch
"""  # a module that stands before torch in sys.modules, and has it
LOAD = "import somebodys_server; somebodys_server.load()\n"
COMMAND = ("warm", TINY, "--buckets", "16", "--batch-sizes", "1")


def run(folder: Path, program: str, *words: str) -> str:
    """What the program prints; modules in the folder can be imported."""
    environ = cli_environment(folder, PYTHONPATH=f"{ROOT}:{folder}")
    done = subprocess.run([sys.executable, "-c", program, *words], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torchs_own_key_of_a_tensor_depends_on_who_imported_torch_and_ours_does_not(tmp_path: Path) -> None:
    """Where the first half fails, tcdeploy/torch_compat/graph_cache_keys.py is needed no more."""
    (tmp_path / "somebodys_server.py").write_text(LATE)
    (torchs, ours), (other_torchs, other_ours) = (run(tmp_path, program).split() for program in (KEYS, LOAD + KEYS))
    assert torchs != other_torchs
    assert ours == other_ours


def test_what_one_program_warmed_another_finds_that_imported_torch_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "somebodys_server.py").write_text(LATE)
    main, asked = "from tcdeploy.cli.app import main; main()", (*COMMAND, "--cache-dir", str(tmp_path / "cache"))
    run(tmp_path, main, *asked)
    run(tmp_path, LOAD + main, *asked, "--require-hit")
