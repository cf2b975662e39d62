"""Runs all checks, each in a thread, and sorts their results: findings first, those that stop a start before others.

A check that raises an exception or hangs does not affect the others. Threads are needed because not every call can be
given a time limit: the resolver of host names, or a file system whose server does not answer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import replace

from tcdeploy.doctor import host, packages
from tcdeploy.doctor.cache_folder import check_cache_folder, check_leftovers, check_plans
from tcdeploy.doctor.gpu import check_driver, check_gpus
from tcdeploy.doctor.result import Check, Request, Result, finding, unchecked
from tcdeploy.doctor.torch_probe import PROBE_SECONDS

LIMIT_SECONDS = PROBE_SECONDS + 30
# By name, in the order of the table. The first of two findings that are equally bad is the worse one.
CHECKS: dict[str, Check] = {
    "Python": packages.check_python,
    "torch": packages.check_torch,
    "Triton": packages.check_triton,
    "transformers": packages.check_transformers,
    "GPU": check_gpus,
    "driver": check_driver,
    "C++ compiler": host.check_compiler,
    "temporary files": host.check_temporary_folder,
    "cache folder": check_cache_folder,
    "disk space": host.check_disk_space,
    "plans": check_plans,
    "leftovers": check_leftovers,
    "variables": host.check_variables,
    "private names": packages.check_internals,
    "bytecode": packages.check_bytecode,
    "flash-attn": packages.check_flash_packages,
    "host": host.check_host,
    "server": packages.check_server_packages,
    "port": host.check_port,
    "Hub": host.check_hub,
}


def examine(
    request: Request, checks: Mapping[str, Check] = CHECKS, limit_seconds: float = LIMIT_SECONDS
) -> list[Result]:
    """The results of all checks, the worst first. Takes at most `limit_seconds`."""
    outcomes: dict[str, list[Result]] = {}
    threads = [
        threading.Thread(target=_run, args=(name, check, request, outcomes), name=name, daemon=True)
        for name, check in checks.items()
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    hanging = finding(
        f"could not be checked: no result within {limit_seconds:.0f} s",
        "look for a network file system or a device that does not answer",
    )
    results = [replace(result, check=name) for name in checks for result in outcomes.get(name) or [hanging]]
    return sorted(results, key=lambda item: (item.state != "finding", not item.is_blocking, item.state == "ok"))


def _run(name: str, check: Check, request: Request, outcomes: dict[str, list[Result]]) -> None:
    try:
        result = check(request)
        outcomes[name] = result if isinstance(result, list) else [result]
    except Exception as error:  # of any check, so that the others are reported
        outcomes[name] = [unchecked(f"{type(error).__name__}: {error}")]
