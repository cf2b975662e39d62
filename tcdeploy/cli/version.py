"""`tcdeploy --version`: the versions that decide whether a cache fits, and the GPU.

It takes 0.1 s: versions come from the metadata of the installed packages, and the GPU from the files of the NVIDIA
driver. On a machine without the driver's files, such as under WSL, no GPU is reported.
"""

from __future__ import annotations

import platform
import re
from collections import Counter
from pathlib import Path

from tcdeploy import __version__
from tcdeploy.planning.environment import installed_version

PACKAGES = ("torch", "triton", "transformers")
DRIVER_FOLDER = Path("/proc/driver/nvidia")


def version_lines(driver_folder: Path = DRIVER_FOLDER) -> list[str]:
    """One line per component: its name and version."""
    packages = [f"{name} {installed_version(name) or 'not installed'}" for name in PACKAGES]
    own = [f"tcdeploy {__version__}", f"python {platform.python_version()}"]
    return [*own, *packages, f"gpu {_describe_gpus(driver_folder)}"]


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
