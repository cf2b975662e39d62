"""Two instruction sets share a cache folder: each start works, and neither replaces the programs of the other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import TINY_FLAGS
from tests.hostile.factors import DEFAULT, FACTORS, Campaign, of


@pytest.mark.long  # four cold starts; planning/test_environment.py compares the keys
def test_two_instruction_sets_share_a_folder(tmp_path: Path, filled_cache: Path) -> None:
    """The first start finds the programs of the filled folder, whose plan has more buckets."""
    folder = shutil.copytree(filled_cache, tmp_path / "cache")
    campaign = Campaign(tmp_path, ("--buckets", "32,128", "--batch-sizes", "1"))
    assert campaign.start(folder, DEFAULT, "--require-hit").returncode == 0
    assert campaign.attack(folder, of(ATEN_CPU_CAPABILITY="default"), DEFAULT, num_starts=3) == ""
    campaign = Campaign(tmp_path, TINY_FLAGS)
    assert campaign.start(folder, DEFAULT, "--require-hit", "--no-compile").returncode == 0


def test_every_factor_has_a_pair_of_values() -> None:
    assert all(len(set(values)) > 1 for values in FACTORS.values())
