"""The variant of a kernel that torch chose is found where the cache folder has moved, and nothing is written back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import cli_environment

pytest.importorskip("triton")

MOVE = """
import json, os, pickle, shutil, sys
from pathlib import Path
from torch._inductor.runtime.autotune_cache import AutotuneCache
from torch._inductor.runtime.triton_heuristics import check_autotune_cache, hash_configs
from triton import Config
from tcdeploy.torch_compat.autotune_cache import relocate_autotune_cache

here, there = map(Path, sys.argv[1:])
variants = [Config({"XBLOCK": size}, num_warps=4) for size in (1, 2, 4)]
source, asked = str(here / "ab" / "cabcd.py"), {"autotune_local_cache": True}

def chosen():
    configs, _, _ = check_autotune_cache(variants, source, asked)
    return [config.kwargs["XBLOCK"] for config in configs]

def write():
    "What a kernel that came with its program does when it has timed its variants."
    pickle.loads(with_program).save(variants[2], 7)
    return here.exists(), len(list(there.rglob("*.best_config")))

os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(here)
winner = AutotuneCache.create(asked, source, hash_configs(variants))
with_program = pickle.dumps(winner)
winner.save(variants[1], 7)
found = [chosen()]
here.rename(there)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(there)
found += [chosen(), write()]
shutil.rmtree(here)
relocate_autotune_cache()
found += [chosen(), write(), chosen()]
print(json.dumps(found))
"""


def test_a_winner_is_found_where_the_folder_has_moved(tmp_path: Path) -> None:
    """Where `torch_finds` or `torch_writes` fails, tcdeploy/torch_compat/autotune_cache.py is needed no more."""
    command = [sys.executable, "-c", MOVE, str(tmp_path / "here"), str(tmp_path / "there")]
    done = subprocess.run(command, env=cli_environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    in_place, torch_finds, torch_writes, ours_finds, ours_writes, ours_finds_then = json.loads(done.stdout)
    assert in_place == [2]
    assert torch_finds == [1, 2, 4]  # all variants, to be timed again
    assert torch_writes == [True, 1]  # into a folder by the old name
    assert ours_finds == [2]
    assert ours_writes == [False, 1]
    assert ours_finds_then == [4]
