"""The CPU cores and the memory that this process may use, and the load on the cores. Does not import torch.

A container may limit cores and memory. The load average is that of the whole host, so it is compared with the cores of
the host. The kernel's pressure (PSI) is also measured for a container, and counts the threads that wait for a core.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
CPU_PRESSURE = (Path("/sys/fs/cgroup/cpu.pressure"), Path("/proc/pressure/cpu"))  # of the container, of the host
MAX_PRESSURE = 20.0  # percent of the last 10 s in which a thread waited for a core; above it timings are unreliable
MAX_LOAD_PER_CORE = 1.25


def count_cores() -> int:
    """CPU cores that this process may use: by its affinity, and by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return cores if quota == "max" else min(cores, int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):
        return cores


def host_memory_bytes() -> int:
    """Physical memory, or the container's limit if that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = MEMORY_LIMIT.read_text().strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def cpu_contention() -> str:
    """The load of other processes that makes timings unreliable now; empty if there is none.

    Call this before the process computes: its own threads count too.
    """
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    reasons = []
    if load > MAX_LOAD_PER_CORE * cores:
        reasons.append(f"the load average is {load:.1f} on {cores} CPU core{'s' if cores > 1 else ''}")
    if (pressure := _cpu_pressure()) > MAX_PRESSURE:
        reasons.append(f"processes waited for a CPU core in {pressure:.0f} % of the last 10 s")
    return ", and ".join(reasons)


def _cpu_pressure() -> float:
    """Percent of the last 10 s; 0 if the kernel does not measure it."""
    for path in CPU_PRESSURE:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return float(path.read_text().split()[1].removeprefix("avg10="))  # some avg10=1.23 avg60=...
    return 0.0
