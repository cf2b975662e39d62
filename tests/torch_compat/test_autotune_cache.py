"""Autotune results are found after the cache folder has moved, and nothing is written under its old name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import cli_environment

pytest.importorskip("triton")

MOVE_FOLDER = """
import json, os, pickle, shutil, sys
from pathlib import Path
from torch._inductor.runtime.autotune_cache import AutotuneCache
from torch._inductor.runtime.triton_heuristics import check_autotune_cache, hash_configs
from triton import Config
from tcdeploy.torch_compat.inductor.autotune_cache import relocate_autotune_cache

old, new = map(Path, sys.argv[1:])
variants = [Config({"XBLOCK": size}, num_warps=4) for size in (1, 2, 4)]
source, inductor_meta = str(old / "ab" / "cabcd.py"), {"autotune_local_cache": True}

def configs_to_time():
    "The block sizes that Inductor would time; one if it has a result."
    configs, _, _ = check_autotune_cache(variants, source, inductor_meta)
    return [config.kwargs["XBLOCK"] for config in configs]

def save_result():
    "Save a result as a kernel does that was loaded with its program."
    pickle.loads(pickled_entry).save(variants[2], 7)
    return old.exists(), len(list(new.rglob("*.best_config")))

os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(old)
entry = AutotuneCache.create(inductor_meta, source, hash_configs(variants))
pickled_entry = pickle.dumps(entry)
entry.save(variants[1], 7)
results = [configs_to_time()]
old.rename(new)
os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(new)
results += [configs_to_time(), save_result()]
shutil.rmtree(old)
relocate_autotune_cache()
results += [configs_to_time(), save_result(), configs_to_time()]
print(json.dumps(results))
"""


def test_an_autotune_result_is_found_after_the_folder_has_moved(tmp_path: Path) -> None:
    """If `torch_finds` or `torch_writes` fails, torch no longer needs torch_compat/inductor/autotune_cache.py."""
    command = [sys.executable, "-c", MOVE_FOLDER, str(tmp_path / "old"), str(tmp_path / "new")]
    result = subprocess.run(command, env=cli_environment(tmp_path), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    in_place, torch_finds, torch_writes, patched_finds, patched_writes, patched_rereads = json.loads(result.stdout)
    assert in_place == [2]
    assert torch_finds == [1, 2, 4]  # all variants, to be timed again
    assert torch_writes == [True, 1]  # in a new folder with the old name
    assert patched_finds == [2]
    assert patched_writes == [False, 1]
    assert patched_rereads == [4]
