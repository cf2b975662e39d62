"""The cores and the memory that a container leaves to this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tcdeploy.planning import host


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", None), ("250000 100000", 2), ("junk", None)])
def test_the_quota_of_a_container_limits_the_cores(
    quota: str, cores: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    monkeypatch.setattr(host, "CPU_QUOTA", tmp_path / "cpu.max")
    assert host.count_cores() == 64, "no file"
    (tmp_path / "cpu.max").write_text(quota)
    assert host.count_cores() == (cores or 64)


@pytest.mark.parametrize(("limit", "limited"), [("max", False), ("1048576", True), ("junk", False)])
def test_the_limit_of_a_container_limits_the_memory(
    limit: str, limited: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "MEMORY_LIMIT", tmp_path / "memory.max")
    physical = host.host_memory_bytes()
    (tmp_path / "memory.max").write_text(limit)
    assert host.host_memory_bytes() == (1 << 20 if limited else physical) and physical > 1 << 20
