"""Two caches side by side: what each was made from, and which of their files differ. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tcdeploy.bundle.why import Factor
from tcdeploy.compiler.manifest import Manifest


@dataclass(frozen=True)
class Comparison:
    """Factors that differ, and files by where they are: paths."""

    factors: tuple[Factor, ...]
    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    other_bytes: tuple[str, ...]
    same: int


def compare_manifests(first: Manifest, second: Manifest) -> Comparison:
    factors = [
        *_differing("environment.", first.environment, second.environment),
        *_differing("plan.", first.plan, second.plan),
        *_differing("config.", first.origin.model_config, second.origin.model_config),
        *_differing("torch.", first.origin.torch_settings, second.origin.torch_settings),
        *_differing("", {"tcdeploy's ops": first.origin.sources}, {"tcdeploy's ops": second.origin.sources}),
    ]
    mine, theirs = ({file.path: file.sha256 for file in one.files} for one in (first, second))
    shared = mine.keys() & theirs.keys()
    other = tuple(sorted(path for path in shared if mine[path] != theirs[path]))
    return Comparison(
        tuple(factors),
        tuple(sorted(mine.keys() - theirs.keys())),
        tuple(sorted(theirs.keys() - mine.keys())),
        other,
        len(shared) - len(other),
    )


def _differing(prefix: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Factor]:
    left_out = {"decisions", "cache_dir", "inductor_cache_dir", "user_cache_dir"}
    names = [name for name in {**first, **second} if name not in left_out]
    return [
        Factor(f"{prefix}{name}", str(first.get(name, "-")), str(second.get(name, "-")))
        for name in names
        if first.get(name) != second.get(name)
    ]
