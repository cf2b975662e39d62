"""`tcdeploy --version`: the versions that decide whether a cache fits, and the GPU. Imports none of the packages.

Versions come from the metadata of the installed packages, GPU and driver from the files of the NVIDIA driver, so that
the option takes 0.1 s. On a machine without the driver's files, such as under WSL, no GPU is reported.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections import Counter
from pathlib import Path

from tcdeploy import __version__

PACKAGES = ("torch", "triton", "transformers")
DRIVER_FOLDER = Path("/proc/driver/nvidia")
NOT_INSTALLED = "not installed"


def version_lines(driver_folder: Path = DRIVER_FOLDER) -> list[str]:
    """One line per component: its name and version."""
    versions = {"python": platform.python_version(), **{name: _installed(name) for name in PACKAGES}}
    lines = [f"{name} {version}" for name, version in versions.items()]
    return [f"tcdeploy {__version__}", *lines, f"gpu {_describe_gpus(driver_folder)}"]


def _installed(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def _describe_gpus(driver_folder: Path) -> str:
    """Such as `2 x NVIDIA H100 80GB HBM3, driver 535.104.05`. Counts all GPUs of the host that the driver lists."""
    models: Counter[str] = Counter()
    for path in sorted(driver_folder.glob("gpus/*/information")):
        models.update(re.findall(r"^Model:\s*(.+?)\s*$", _read(path), re.MULTILINE))
    if not models:
        return "none"
    gpus = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in models.items())
    driver = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", _read(driver_folder / "version"))
    return f"{gpus}, driver {driver[1]}" if driver else gpus


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
