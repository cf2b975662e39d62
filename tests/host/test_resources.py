"""The cores and the memory that a container leaves to this process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tcdeploy.host import resources as host


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


PRESSURE = "some avg10={} avg60=1.00 avg300=0.50 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


@pytest.mark.parametrize(
    ("load", "pressure", "reasons"),
    [
        (1.9, "3.10", []),
        (6.0, "3.10", ["the load average is 6.0 on 2 CPU cores"]),
        (1.9, "35.02", ["processes waited for a CPU core in 35 % of the last 10 s"]),
        (6.0, None, ["the load average is 6.0 on 2 CPU cores"]),
        (6.0, "90.00", ["the load average is 6.0 on 2 CPU cores", "processes waited for a CPU core in 90 %"]),
    ],
)
def test_a_machine_is_busy_by_its_load_average_or_by_the_pressure_of_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load: float, pressure: str | None, reasons: list[str]
) -> None:
    """The pressure of the container has precedence, and the load average is compared with the cores of the host."""
    own, of_host = tmp_path / "cpu.pressure", tmp_path / "cpu"
    of_host.write_text("junk" if pressure is None else PRESSURE.format("99.00"))
    if pressure is not None:
        own.write_text(PRESSURE.format(pressure))
    monkeypatch.setattr(host, "CPU_PRESSURE", (own, of_host))
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert all(reason in host.cpu_contention() for reason in reasons) and bool(reasons) == bool(host.cpu_contention())
