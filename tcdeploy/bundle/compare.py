"""Compares two caches: what each was made from, which files differ, and which is newer. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tcdeploy.cache.record.bundle_header import PATH_FIELDS, Header, parse_header, rollback_reason
from tcdeploy.cache.record.manifest import Manifest, diff_sources
from tcdeploy.cache.trust.signing import read_signed_header
from tcdeploy.errors import IntegrityError, MismatchError, TrustError
from tcdeploy.host.regular_file import open_regular
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


def check_not_older(new: Path, existing: Path) -> None:
    """Raise TrustError if both files are bundles of the same plan and the new one is older.

    Raises IntegrityError or MismatchError if this version can read the existing bundle and not the new one. Signatures
    are not verified.
    """
    try:
        existing_header = _read_header(existing)
    except (OSError, IntegrityError, MismatchError):
        return
    new_header = _read_header(new)
    if new_header.plan_key == existing_header.plan_key and (reason := rollback_reason(new_header, existing_header)):
        raise TrustError(
            f"the bundle is older than {existing}, which it would replace: {reason}",
            "pull it to another file, or add --allow-rollback",
        )


def _read_header(path: Path) -> Header:
    with open_regular(path, follows_links=True) as file:
        return parse_header(read_signed_header(file, str(path)), str(path))
