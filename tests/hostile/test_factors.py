"""Two instruction sets share a cache folder: each start works, and neither replaces the programs of the other."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.conftest import TINY, TINY_FLAGS, RunCLI
from tests.hostile.factors import DEFAULT, FACTORS, Campaign, of


def test_two_instruction_sets_share_a_folder(tmp_path: Path, filled_cache: Path, run_cli: RunCLI) -> None:
    """The filled folder has the programs of the default one, and a plan with more buckets."""
    folder = shutil.copytree(filled_cache, tmp_path / "cache")
    campaign = Campaign(tmp_path, ("--buckets", "32", "--batch-sizes", "1"))
    assert campaign.attack(folder, of(ATEN_CPU_CAPABILITY="default"), DEFAULT, num_starts=3) == ""
    flags = (*TINY_FLAGS, "--cache-dir", str(folder))
    hit = run_cli("warm", TINY, *flags, "--require-hit", "--no-compile")
    assert hit.returncode == 0, hit.stderr


def test_every_factor_has_a_pair_of_values() -> None:
    assert all(len(set(values)) > 1 for values in FACTORS.values())
