"""Two caches side by side: what each was made from, and which of their files differ. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tcdeploy.bundle.header import PATH_FIELDS
from tcdeploy.cache.manifest import Manifest, diff_sources
from tcdeploy.planning.environment import Difference, diff_mappings


@dataclass(frozen=True)
class Comparison:
    """What differs of all that both were made from, and files by where they are: paths."""

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
    mine, theirs = ({file.path: file.sha256 for file in one.files} for one in (first, second))
    shared = mine.keys() & theirs.keys()
    other = tuple(sorted(path for path in shared if mine[path] != theirs[path]))
    return Comparison(
        tuple(differences),
        tuple(sorted(mine.keys() - theirs.keys())),
        tuple(sorted(theirs.keys() - mine.keys())),
        other,
        len(shared) - len(other),
    )


def _without_paths(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in (*PATH_FIELDS, "decisions")}
