"""Compares two caches: what each was made from, and which of their files differ. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tcdeploy.bundle.header import PATH_FIELDS
from tcdeploy.cache.manifest import Manifest, diff_sources
from tcdeploy.planning.environment import Difference, diff_mappings


@dataclass(frozen=True)
class Comparison:
    """Inputs that differ, paths that are in one cache only or have other content, and the count of identical files."""

    differences: tuple[Difference, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    changed: tuple[str, ...]
    same: int


def compare_manifests(first: Manifest, second: Manifest) -> Comparison:
    differences = [
        *diff_mappings(_without_paths(first.environment), _without_paths(second.environment), "environment."),
        *diff_mappings(_without_paths(first.plan), _without_paths(second.plan), "plan."),
        *diff_mappings(first.origin.model_config, second.origin.model_config, "config."),
        *diff_mappings(first.origin.torch_settings, second.origin.torch_settings, "torch."),
        *diff_sources(first.origin, second.origin),
    ]
    first_files, second_files = ({file.path: file.sha256 for file in manifest.files} for manifest in (first, second))
    shared = first_files.keys() & second_files.keys()
    changed = tuple(sorted(path for path in shared if first_files[path] != second_files[path]))
    return Comparison(
        tuple(differences),
        tuple(sorted(first_files.keys() - second_files.keys())),
        tuple(sorted(second_files.keys() - first_files.keys())),
        changed,
        len(shared) - len(changed),
    )


def _without_paths(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in (*PATH_FIELDS, "decisions")}
