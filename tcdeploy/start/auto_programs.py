"""Resolves `--programs auto`: packages if the cache folder has them for this start, otherwise jit programs.

A start is resolved at the first of these points that decides it:

1. The request alone: eager and measuring starts, and regions other than layers, use jit. So does a start whose cache
   folder has no packages of any plan, which costs one `stat`.
2. A start record that fits: `prepare` starts from packages, without the model's code (start/packages.py).
3. The plan, made with packages: its manifest lists them (`resolve_planned`). transformers loads the model then, as with
   `--programs aot` without a record.

Everything after this sees `jit` or `aot`, in the recipe and in the plan, and so do start records and manifests: what
`--programs aot` has written, `auto` finds, and the reverse. A start that is resolved to `aot` compiles no packages,
because a manifest is written only after all buckets have run. Does not import torch.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tcdeploy.cache.folder.layout import AOT_DIR, manifest_path
from tcdeploy.cache.record.manifest import Manifest, read_manifest
from tcdeploy.cache.record.provenance import SigningPolicy, check_manifests
from tcdeploy.cache.record.unlisted import is_damaged
from tcdeploy.errors import TrustError
from tcdeploy.planning.environment import find_cache_dir
from tcdeploy.planning.plan import make_plan, missing_for_packages
from tcdeploy.planning.recipe import ProgramKind, Recipe
from tcdeploy.start.planned import Planned, PlannedModel, StartRequest

if TYPE_CHECKING:
    from tcdeploy.planning.plan import Plan

PACKAGES_FOUND = "packages of this plan are in the cache"
NO_PACKAGES = "no packages of this plan in the cache; `tcdeploy warm` builds them"
log = logging.getLogger("tcdeploy.start")


def may_use_packages(request: StartRequest) -> bool:
    """Whether a start with this request may run packages. False with `auto` if no plan of the cache folder has any."""
    recipe = request.recipe
    if recipe.programs != "auto":
        return recipe.programs == "aot"
    return not request.jit_reason and recipe.region == "layer" and _has_any_packages(recipe)


def with_programs(planned: PlannedModel, programs: ProgramKind, reason: str = "") -> PlannedModel:
    """The same model, planned for other programs. `reason`: shown with the choice in the printed plan."""
    recipe = dataclasses.replace(planned.recipe, programs=programs)
    plan = make_plan(recipe, planned.environment, planned.architecture, planned.model_decisions, reason)
    return dataclasses.replace(planned, recipe=recipe, plan=plan)


def resolve_planned(
    planned: PlannedModel, package_folder: Callable[[Plan], Path], jit_reason: str = "",
    policy: SigningPolicy | None = None,
) -> PlannedModel:  # fmt: skip
    """The model planned for packages or for jit if its recipe says `auto`, otherwise `planned` itself.

    `package_folder`: where a plan's packages are on this machine. `jit_reason`: that of the StartRequest. `policy`:
    which packages are trusted; None: the recipe's. Raises IntegrityError if the manifest of the packages is damaged.
    """
    if planned.recipe.programs != "auto":
        return planned
    reason = jit_reason or why_not_exported(planned)
    if not reason and _has_any_packages(planned.recipe):
        packaged = with_programs(planned, "aot", PACKAGES_FOUND)
        policy = policy or StartRequest(planned.recipe).signing_policy
        reason = _why_unusable(packaged, package_folder, policy)
        if not reason:
            return packaged
    return with_programs(planned, "jit", reason or NO_PACKAGES)


def why_not_exported(planned: Planned) -> str:
    """Why packages of this model can neither be built nor used here; "" if they can, as far as the plan shows."""
    if planned.recipe.region != "layer":
        return f"packages need --region layer, not {planned.recipe.region}"
    if missing := missing_for_packages(planned.environment):
        return f"packages need a private interface that this torch lacks: {missing}"
    return ""


def _has_any_packages(recipe: Recipe) -> bool:
    return Path(find_cache_dir(recipe.cache_dir)[0], AOT_DIR).is_dir()


def _why_unusable(packaged: PlannedModel, package_folder: Callable[[Plan], Path], policy: SigningPolicy) -> str:
    """Why the packages of this plan cannot be used; "" if they can."""
    plan, rebuilds = packaged.plan, packaged.recipe.on_bad_cache == "rebuild"
    path = manifest_path(plan.cache_dir, plan.key)
    if not path.is_file():
        return NO_PACKAGES
    if rebuilds and not policy.require_signed and is_damaged(plan.cache_dir, plan.key, policy.trusted_keys):
        return "the packages of this plan are damaged; `tcdeploy warm` builds them again"
    manifest = read_manifest(path)
    if manifest is None:
        return NO_PACKAGES
    try:
        check_manifests(plan.cache_dir, plan.key, {plan.key: manifest}, policy)
    except TrustError as error:
        log.warning("the packages of this plan are not used: %s", error.message)
        return "the packages of this plan are not trusted"
    if plan.tune_seconds > manifest.plan["tune_seconds"]:
        return "the packages of this plan were tuned for a shorter time; `tcdeploy warm` with these flags tunes them"
    return "" if _lists_packages(manifest, package_folder(plan)) else NO_PACKAGES


def _lists_packages(manifest: Manifest, folder: Path) -> bool:
    """Whether the manifest lists packages in this folder, which is another one if the sources have changed."""
    return any(file.path.startswith(f"{AOT_DIR}/{folder.name}/") for file in manifest.files)
