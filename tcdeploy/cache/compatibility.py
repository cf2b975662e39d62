"""Compares the environment of ahead-of-time packages with this one. Does not import torch.

A start from packages compiles nothing, so it needs less than the start that made them: `assume_recorded` completes the
environment with what is not installed here and not used. What still differs makes another plan, and `made_elsewhere`
names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Protocol

from tcdeploy.cache.manifest import manifest_path, read_manifest
from tcdeploy.errors import IntegrityError, MismatchError
from tcdeploy.planning.environment import Difference, Environment, diff_environments, parse_environment

MAX_NAMED = 5
HINT = (
    "pack them again with these flags in an environment like this one (tcdeploy cache pack), or start on a machine and "
    "with versions like those of the packages"
)


class Recorded(Protocol):
    """An Environment, or a record that has these fields of one."""

    @property
    def compiler(self) -> str: ...
    @property
    def transformers(self) -> str: ...
    @property
    def triton(self) -> str: ...
    @property
    def install_paths(self) -> str: ...
    @property
    def missing_internals(self) -> tuple[tuple[str, str], ...]: ...


def assume_recorded(environment: Environment, recorded: Recorded) -> Environment:
    """`environment`, completed by what was recorded: what is not installed here, and what the programs do not use.

    A C++ compiler and transformers are never needed, Triton only on a GPU. `install_paths` affects only compilation, so
    the recorded value is used.
    """
    return dataclasses.replace(
        environment,
        compiler=environment.compiler or recorded.compiler,
        transformers=environment.transformers or recorded.transformers,
        triton=environment.triton or ("" if environment.gpus else recorded.triton),
        install_paths=recorded.install_paths,
        missing_internals=recorded.missing_internals,
    )


def made_elsewhere(cache_dir: str, plan_keys: Iterable[str], environment: Environment) -> MismatchError | None:
    """The error of packages that were made in another environment.

    None if the environment of one of these plans is this one, and if none of them has packages.
    """
    found = [_differences(environment, there) for there in _environments(cache_dir, plan_keys)]
    nearest = min(found, key=len, default=[])
    if not nearest:
        return None
    named = [f"{item.name} {item.there or 'none'} (here {item.here or 'none'})" for item in nearest[:MAX_NAMED]]
    return MismatchError(f"those in {cache_dir} were made in another environment: {', '.join(named)}", HINT)


def _environments(cache_dir: str, plan_keys: Iterable[str]) -> Iterator[Environment]:
    """Of the plans that have packages. A manifest that cannot be read is left out: its plan is not started."""
    for key in plan_keys:
        with contextlib.suppress(IntegrityError, KeyError, TypeError, AttributeError):
            manifest = read_manifest(manifest_path(cache_dir, key))
            if manifest is not None and manifest.plan.get("programs") == "aot":
                yield parse_environment(manifest.environment)


def _differences(here: Environment, there: Environment) -> list[Difference]:
    """With Python's patch level, which a record's name contains (start_record.py)."""
    differences = diff_environments(assume_recorded(here, there), there)
    if here.python != there.python and "python" not in {item.name for item in differences}:
        differences.append(Difference("python", here.python, there.python))
    return differences
