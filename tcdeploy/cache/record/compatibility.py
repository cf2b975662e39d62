"""Compares the environment of ahead-of-time packages with this one. Does not import torch.

A start from packages compiles nothing, so some fields of the environment do not matter to it. `assume_recorded` takes
those from the record. If others differ, the plan key differs too, and `environment_mismatch` names the differences.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from tcdeploy.cache.folder.layout import manifest_path
from tcdeploy.cache.record.manifest import read_manifest
from tcdeploy.errors import IntegrityError, MismatchError
from tcdeploy.planning.environment import Difference, Environment, diff_environments, parse_environment

MAX_NAMED = 5
HINT = (
    "pack the model again in this environment with these flags (tcdeploy cache pack), or start with the hardware, the "
    "versions and the flags that the packages were made with"
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
    @property
    def torch_settings(self) -> str: ...


def assume_recorded(environment: Environment, recorded: Recorded) -> Environment:
    """`environment`, with the recorded values for packages that are missing here and for facts that starts ignore.

    A C++ compiler and transformers are never needed, Triton only on a GPU. `install_paths` and `torch_settings` affect
    only compilation, so the recorded values are used.
    """
    return dataclasses.replace(
        environment,
        compiler=environment.compiler or recorded.compiler,
        transformers=environment.transformers or recorded.transformers,
        triton=environment.triton or ("" if environment.gpus else recorded.triton),
        install_paths=recorded.install_paths,
        missing_internals=recorded.missing_internals,
        torch_settings=recorded.torch_settings,
    )


def environment_mismatch(
    cache_dir: str, plan_keys: Iterable[str], environment: Environment, model: str | None = None
) -> MismatchError | None:
    """A MismatchError that names what differs between this environment and that of the packages of these plans.

    model: leave out plans of other models, by the name or path that they were packed with.

    The plan with the fewest differences is reported. None if one plan has no differences, or if no plan has packages.
    """
    differences_by_plan = [_differences(environment, there) for there in _environments(cache_dir, plan_keys, model)]
    nearest = min(differences_by_plan, key=len, default=[])
    if not nearest:
        return None
    named = [f"{item.name} {item.there or 'none'} (here {item.here or 'none'})" for item in nearest]
    return MismatchError(
        f"the packages in {cache_dir} were made in another environment: {join_differences(named)}", HINT
    )


def join_differences(texts: Sequence[str]) -> str:
    """The first five texts, and how many more there are."""
    rest = [f"{len(texts) - MAX_NAMED} more"] if len(texts) > MAX_NAMED else []
    return ", ".join([*texts[:MAX_NAMED], *rest])


def _environments(cache_dir: str, plan_keys: Iterable[str], model: str | None) -> Iterator[Environment]:
    """The environments of the plans that have packages, without plans whose manifest cannot be read."""
    for key in plan_keys:
        with contextlib.suppress(IntegrityError, OSError, KeyError, TypeError, AttributeError):
            manifest = read_manifest(manifest_path(cache_dir, key))
            if manifest is None or manifest.plan.get("programs") != "aot":
                continue
            if model in (None, manifest.plan.get("model")):
                yield parse_environment(manifest.environment)


def _differences(here: Environment, there: Environment) -> list[Difference]:
    """Cache factors that differ, and Python's patch version, which must be equal too (start/record/factors.py)."""
    differences = diff_environments(assume_recorded(here, there), there)
    if here.python != there.python and "python" not in {item.name for item in differences}:
        differences.append(Difference("python", here.python, there.python))
    return differences
