"""`tcdeploy cache why`, `ls`, `du`, `gc` and `diff`: what a cache holds, whether it fits, and what can be deleted."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tcdeploy.cli import cache_target
from tcdeploy.cli.cache_target import CacheDir, Folder, OptionalFolder, Target, TrustCacheDir, find_cache_folder
from tcdeploy.cli.options import RecipeOptions, options_command
from tcdeploy.cli.report_options import Json
from tcdeploy.errors import MismatchError, UsageError

if TYPE_CHECKING:
    from tcdeploy.bundle.why import Forecast
    from tcdeploy.cache.record.manifest import Manifest
    from tcdeploy.start.planned import PlannedModel

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "s": 1, "min": 60, "h": 3600, "d": 86400}


@options_command
def why(target: Target, options: RecipeOptions, json: Json = False) -> None:
    """Predict cache hits on this machine without starting anything. Exits with code 3 if a bucket would miss.

    For each miss: which property of the environment, model or plan differs, and the seconds that compiling will
    take. Without MODEL, the recipe that filled the cache is used, changed by the flags; a folder with plans of several
    recipes needs MODEL.
    """
    from tcdeploy.cli import cache_display

    manifests = cache_target.read_manifests(target)
    recipe = options.build(bundle_recipe=cache_target.shared_recipe(manifests))
    from tcdeploy.start.auto_programs import why_not_exported, with_programs
    from tcdeploy.start.decide import decide

    jit_recipe = dataclasses.replace(recipe, programs="jit")
    planned = decide(jit_recipe if recipe.programs == "auto" else recipe, needs_weights=False)
    merged = _forecast(planned, manifests)
    if recipe.programs == "auto" and not why_not_exported(planned):  # a start uses packages where it finds them
        with_packages = _forecast(with_programs(planned, "aot"), manifests)
        merged = merged if with_packages.misses else with_packages
    cache_display.show_forecast(merged, json)
    if merged.misses:
        raise MismatchError(
            f"{len(merged.misses)} of {len(merged.buckets)} buckets would miss, about {merged.miss_seconds:.0f} s",
            "tcdeploy warm with the same flags fills the cache",
        )


def _forecast(planned: PlannedModel, manifests: list[Manifest]) -> Forecast:
    from tcdeploy.bundle.why import forecast, merge_forecasts
    from tcdeploy.start.decide import origin_of, with_cxx_compiler

    forecasts = []
    for manifest in manifests:
        assumed = planned
        if not planned.environment.compiler and manifest.plan["programs"] == "aot":  # packages start without one
            assumed = with_cxx_compiler(planned, str(manifest.environment["compiler"]))
        forecasts.append(forecast(manifest, assumed.plan, assumed.environment, origin_of(assumed)))
    return merge_forecasts(forecasts)


def list_cache(folder: OptionalFolder = None, cache_dir: CacheDir = None, json: Json = False) -> None:
    """List the plans in a cache folder, and what starts that did not finish have left for the next start."""
    from tcdeploy.cache.inventory import list_plans, list_unfinished
    from tcdeploy.cli import cache_display

    found = find_cache_folder(folder, cache_dir)
    cache_display.show_plans(found, list_plans(found), list_unfinished(found), json)
    cache_display.show_other_versions(found, "listed")


def disk_usage(folder: OptionalFolder = None, cache_dir: CacheDir = None, json: Json = False) -> None:
    """Show the disk usage of a cache folder by kind of file."""
    from tcdeploy.cache.inventory import usage_by_kind
    from tcdeploy.cli.cache_display import usage_document, usage_table
    from tcdeploy.cli.display import report

    usage = usage_by_kind(find_cache_folder(folder, cache_dir))
    report("cache du", json, usage_table(usage), kinds=usage_document(usage))


def collect_garbage(
    folder: Folder,
    older_than: Annotated[
        str | None, typer.Option(help="Remove plans not started for this long, for example 30d or 12h")
    ] = None,
    max_size: Annotated[
        str | None, typer.Option(help="Remove least recently used plans until this size is met, for example 5g")
    ] = None,
    unlisted: Annotated[
        bool,
        typer.Option(
            "--unlisted",
            help="Remove files that no plan lists even if they are newer than 24 hours; not while a program other than "
            "tcdeploy uses the folder",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be removed, and remove nothing")] = False,
    trust_cache_dir: TrustCacheDir = False,
    json: Json = False,
) -> None:
    """Remove plans by age and size, and files that no plan lists.

    Plans in use by a process and plans unpacked from a bundle are never removed. Plans of other versions of tcdeploy,
    from bundles too, are removed 24 hours after their last start.
    """
    from tcdeploy.cache import inventory
    from tcdeploy.cache.folder.access import check_folder
    from tcdeploy.cli import cache_display

    seconds = _parse_quantity("--older-than", older_than, ("s", "min", "h", "d"), "30d")
    size = _parse_quantity("--max-size", max_size, ("", "k", "m", "g"), "5g")
    max_bytes = None if size is None else int(size)
    check_folder(find_cache_folder(folder), trust_cache_dir, must_exist=True)
    removed = inventory.collect_garbage(folder, seconds, max_bytes, dry_run, unlisted)
    cache_display.show_removed(removed, dry_run, json)


def diff(
    first: Target,
    second: Annotated[
        Path, typer.Argument(help="Bundle or cache folder to compare with", metavar="SECOND", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Compare two bundles or cache folders, each of one plan and its packages: their inputs and their files."""
    from tcdeploy.bundle.why import compare_manifests
    from tcdeploy.cli import cache_display

    manifests = (cache_target.read_plan_manifests(target) for target in (first, second))
    cache_display.show_comparison(compare_manifests(*manifests), json)


def _parse_quantity(option: str, text: str | None, units: tuple[str, ...], example: str) -> float | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]*)", text.lower())
    if match is None or match[2] not in units:
        raise UsageError(
            f"{option} is {text!r}, expected a number with a unit of {', '.join(filter(None, units))}",
            f"{option} {example}",
        )
    return float(match[1]) * UNITS[match[2]]
