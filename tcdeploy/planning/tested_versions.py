"""The versions of torch, Triton, transformers and uvicorn that the tests of this release ran with.

Newer versions are allowed, because a user may be the first to run one: the Plan then carries one warning, and
`torch_compat` reports each private name that such a version has moved. This table is the only place that holds the
ranges. Does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TESTED_VERSIONS = {  # package -> (oldest, newest), both included, compared by major and minor number
    "torch": ("2.11", "2.13"),
    "triton": ("3.6", "3.7"),
    "transformers": ("5.17", "5.23"),
    "uvicorn": ("0.54", "0.54"),
}


def tested_range(package: str) -> str:
    """The range as text: "2.11 to 2.13"."""
    oldest, newest = TESTED_VERSIONS[package]
    return oldest if oldest == newest else f"{oldest} to {newest}"


def untested_packages(versions: Mapping[str, str]) -> list[str]:
    """Those of `versions` (package -> version, empty if not installed) that are outside the tested range."""
    untested = []
    for package, version in versions.items():
        oldest, newest = map(_major_minor, TESTED_VERSIONS[package])
        if version and not oldest <= _major_minor(version) <= newest:
            untested.append(package)
    return untested


def is_older_than_tested(package: str, version: str) -> bool:
    """Whether a version is older than the oldest tested one. False for text that is not a version."""
    return () < _major_minor(version) < _major_minor(TESTED_VERSIONS[package][0])


def _major_minor(version: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu"; () for text that is not a version, which counts as untested."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else ()
