"""A kill at a system call of pack, unpack, push, pull or a start loses nothing, and the next run succeeds.

Each command is killed at a write and at another call; scripts/test --long kills most commands at more of them.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import TINY, TINY_FLAGS
from tests.hostile.kills import Campaign, campaign, choose

START = ("warm", TINY, *TINY_FLAGS, "--programs", "jit")
OTHER_START = ("warm", TINY, "--buckets", "32", "--batch-sizes", "1", "--programs", "jit")


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory, filled_cache: Path) -> Iterator[Campaign]:
    """A campaign with the plan of the shared cache, and a plan with fewer buckets that uses the same programs."""
    work_dir = tmp_path_factory.mktemp("kills")
    for name in ("filled", "other"):
        shutil.copytree(filled_cache, work_dir / name)
    with campaign(work_dir, start=START, other_start=OTHER_START) as kills_campaign:
        yield kills_campaign


COMMANDS = ("warm, cached", "pack", "unpack", "unpack over a damaged plan", "push", "pull")
LONG_KILLS = {"pack": 4, "unpack": 6, "unpack over a damaged plan": 3, "push": 3, "pull": 3}


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, 2) for name in COMMANDS[1:]),
        pytest.param(COMMANDS[0], 2, marks=pytest.mark.long),  # cache/test_folder.py kills it during a compilation
        *(pytest.param(*item, marks=pytest.mark.long) for item in LONG_KILLS.items()),
    ],
)
def test_nothing_is_lost_and_the_next_run_succeeds(kills: Campaign, name: str, count: int) -> None:
    [command] = [command for command in kills.commands() if command.name == name]
    calls = kills.count_calls(command)
    numbers = choose(random.Random(name), calls, count)
    assert len(numbers) == count
    outcomes = {number: kills.kill(command, number) for number in numbers}
    assert any(outcome.was_killed for outcome in outcomes.values())
    assert {number: outcome.problem for number, outcome in outcomes.items() if outcome.problem} == {}
