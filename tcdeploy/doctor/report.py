"""The text for a bug report: versions, hardware, variables and findings, without secrets and names of users and hosts.

Only variables with known prefixes are listed, and the values of those whose names suggest a secret are left out.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import socket
from collections.abc import Sequence

from tcdeploy import __version__
from tcdeploy.doctor.result import Request, Result
from tcdeploy.planning.environment import installed_flash_packages, installed_version
from tcdeploy.planning.kubernetes import is_service_variable
from tcdeploy.start.record.record import COMPILER_PREFIXES

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "uvicorn", "llguidance")
PREFIXES = (*COMPILER_PREFIXES, *"TCDEPLOY_ CUDA_ NVIDIA_VISIBLE_DEVICES OMP_ PYTORCH_ PYTHON LD_PRELOAD".split())
SET_ONLY = ("HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HTTPS_PROXY", "CXX", "CC", "TMPDIR")  # values are left out
SECRET = re.compile("TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
MAX_VALUE_CHARS = 100
MIN_NAME_LENGTH = 3  # shorter names of users and hosts would replace parts of words
COMMON_NAMES = ("root", "localhost")


def bug_report(request: Request, results: Sequence[Result]) -> str:
    """`results`: of the checks, which may have waited for the probe."""
    environment = request.probe.environment
    gpus = environment.describe_gpus() if environment is not None else f"unknown: {request.probe.reason('environment')}"
    driver = request.probe.sections.get("driver") or {}
    drivers = sorted({gpu["driver_version"] for gpu in driver.get("gpus", ())})
    torch = request.probe.sections.get("torch") or {}
    versions = [f"{name} {installed_version(name) or '-'}" for name in PACKAGES]
    versions += [f"{name} {version}" for name, version in installed_flash_packages()]
    by_name = {result.check: result.summary for result in results}
    lines = [
        f"tcdeploy {__version__}, {platform.python_implementation()} {platform.python_version()}",
        f"packages: {', '.join(versions)}",
        f"torch: {torch.get('version', '-')}, CUDA {torch.get('cuda') or '-'}",
        f"GPU: {gpus or 'none'}; driver {', '.join(drivers) or '-'}",
        f"system: {platform.platform()}; {by_name.get('host', '-')}",
        f"C++ compiler: {by_name.get('C++ compiler', '-')}",
        f"variables: {', '.join(_variables()) or 'none'}",
        *(f"{result.state}: {result.check}: {result.summary}" for result in results if result.state != "ok"),
    ]
    return redact("\n".join(lines))


def _variables() -> list[str]:
    values = [
        # Redacted before it is cut, which could leave a part of a name.
        f"{name} is set" if SECRET.search(name) else f"{name}={redact(value)[:MAX_VALUE_CHARS]}"
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES) and name not in SET_ONLY and not is_service_variable(name, value)
    ]
    return values + [f"{name} is set" for name in SET_ONLY if name in os.environ]


def redact(text: str) -> str:
    """Replace the home folder, names of users and of this host, and logins and queries in URLs."""
    home = os.path.expanduser("~")
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home.rstrip('/'))}(?![\w.-])", "~", text)
    text = re.sub(r"/(home|Users)/[^/\s:,;)]+", r"/\1/USER", text)
    text = re.sub(r"\b(belongs to the user|by the group) [^\s,]+", r"\1 NAME", text)
    text = re.sub(r"(\w+://)[^/\s@]+@", r"\1", text)
    text = re.sub(r"(\w+://[^\s?]+)\?\S+", r"\1?...", text)
    for name, replacement in ((_user_name(), "USER"), (socket.gethostname(), "HOST")):
        if len(name) >= MIN_NAME_LENGTH and name not in COMMON_NAMES:
            text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", replacement, text)
    return text


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
