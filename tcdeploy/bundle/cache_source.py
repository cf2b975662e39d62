"""Names where a cache is fetched from. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CacheSource:
    """Arguments of `bundle.fetch.fetch`, without the recipe and the trusted keys."""

    source: str  # path or URL of a bundle, or of a folder of bundles
    allow_unsigned: bool = False  # accept a bundle without a trusted signature; its code runs on this machine
    allow_rollback: bool = False  # accept a bundle that is older than the one it replaces
