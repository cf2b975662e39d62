"""`tcdeploy warm`: fill the persistent cache, check every bucket, and report hits and misses."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from tcdeploy.cli.blind_build import build_for, check_target_options
from tcdeploy.cli.options import options_command
from tcdeploy.cli.remote_cache import AllowRollback, AllowUnsigned, CacheFrom, TrustedKeys, cache_source, fetch_cache
from tcdeploy.cli.report_options import (
    Budget,
    DryRun,
    Json,
    TargetGPU,
    Winners,
    enforce_budget,
    parse_budget,
    warn_if_busy,
)
from tcdeploy.errors import CompileError, IntegrityError, ThresholdError, UsageError
from tcdeploy.planning.recipe import Recipe

if TYPE_CHECKING:
    from tcdeploy.host.progress import Progress
    from tcdeploy.planning.gpu_description import GPUDescription
    from tcdeploy.start.deployment import StartReport
    from tcdeploy.start.package_build import PackageResult

MissedShapes = Annotated[
    str | None,
    typer.Option("--from", help="Add buckets for the request shapes in a server's missed_shapes.jsonl", metavar="FILE"),
]
CacheTo = Annotated[
    str | None, typer.Option(help="Pack the plan and push the bundle to this remote folder", metavar="URL")
]
SigningKey = Annotated[
    Path | None, typer.Option("--sign", help="With --cache-to: sign the bundle with this key", metavar="NAME.key")
]


@options_command
def warm(
    recipe: Recipe,
    dry_run: DryRun = False,
    target_gpu: TargetGPU = None,
    winners: Winners = None,
    missed_shapes: MissedShapes = None,
    require_hit: Annotated[
        bool, typer.Option("--require-hit", help="Exit with code 6 if a bucket had to compile")
    ] = False,
    budget: Budget = None,
    cache_from: CacheFrom = None,
    cache_to: CacheTo = None,
    key: SigningKey = None,
    allow_unsigned: AllowUnsigned = False,
    allow_rollback: AllowRollback = False,
    trusted_keys: TrustedKeys = None,
    json: Json = False,
) -> None:
    """Compile, capture and check every bucket of MODEL, and keep the programs in the cache folder.

    Safe to repeat and to run in parallel. Without a GPU nothing is captured. Afterwards, ahead-of-time packages are
    built in another process (--programs jit: none; --programs aot: only packages). With --require-hit nothing is built,
    and the report says whether later starts use packages. With --target-gpu, packages for a GPU that this machine does
    not have are compiled; the first start on the GPU runs, captures and checks them.
    """
    from tcdeploy.cli import display

    if dry_run and (require_hit or budget or cache_from or cache_to or winners):
        excluded = "--require-hit, --budget, --cache-from, --cache-to and --winners"
        raise UsageError(f"--dry-run excludes {excluded}", "remove --dry-run")
    if not dry_run:
        needs_gpu = {"--require-hit": require_hit, "--budget": budget, "--cache-from": cache_from}
        check_target_options(recipe, target_gpu, winners, needs_gpu)
    if key is not None and cache_to is None:
        raise UsageError("--sign needs --cache-to", "add --cache-to URL, or remove --sign")
    cache = cache_source(cache_from, allow_unsigned, allow_rollback)
    budget_seconds, fetch_seconds = parse_budget(budget), 0.0
    if dry_run:
        _show_plan(recipe, target_gpu, missed_shapes, json)
        return
    if target_gpu is not None:
        _build_for_target(recipe, target_gpu, winners, missed_shapes, cache_to, key, trusted_keys, json)
        return
    if recipe.tune_seconds:
        warn_if_busy()
    with display.show_progress() as progress:
        if missed_shapes is not None:
            recipe = _with_missed_shapes(recipe, missed_shapes)
        if cache is not None:
            fetch_seconds = fetch_cache(recipe, cache, trusted_keys, progress)
        is_packed = cache_to is not None
        report, packages = fill_cache(recipe, progress, trusted_keys, builds=not require_hit, is_packed=is_packed)
    display.show_warm_report(report, packages, json)
    if require_hit:
        _enforce_hits(report, packages)
    _require_record(report)
    enforce_budget({**report.stage_seconds, "fetch": fetch_seconds}, budget_seconds)
    if cache_to is not None:
        _push(report.cache_dir, filled_plans(report, packages), cache_to, key)


def _show_plan(recipe: Recipe, target_gpu: str | None, missed_shapes: str | None, json: bool) -> None:
    """The plan of a dry run, and what this machine lacks for it."""
    from tcdeploy.cli import display

    target = _target(target_gpu)
    with display.show_progress():
        if missed_shapes is not None:
            recipe = _with_missed_shapes(recipe, missed_shapes, True, target)
        from tcdeploy.start.decide import decide

        planned = decide(recipe, is_dry_run=True, jit_reason="packages are built afterwards", target=target)
    display.show_plan(planned.plan, planned.findings, json)


def _build_for_target(
    recipe: Recipe, target: str, winners: Path | None, missed_shapes: str | None, cache_to: str | None,
    key: Path | None, trusted_keys: Path | None, json: bool,
) -> None:  # fmt: skip
    from tcdeploy.cli import display

    with display.show_progress() as progress:
        if missed_shapes is not None:
            recipe = _with_missed_shapes(recipe, missed_shapes, target=_target(target))
        result = build_for(recipe, target, winners, trusted_keys, progress)
    display.show_blind_build(result, target, json)
    if cache_to is not None:
        _push(result.cache_dir, [result.plan_key], cache_to, key)


def _push(cache_dir: str, plan_keys: list[str], url: str, key: Path | None) -> None:
    from tcdeploy.bundle.fetch import pack_and_push
    from tcdeploy.cli.cache_display import format_pushed

    print(f"cache: {format_pushed(pack_and_push(cache_dir, plan_keys, url, key))}", file=sys.stderr)


def fill_cache(
    recipe: Recipe, progress: Progress, trusted_keys: Path | None = None, *, builds: bool = True, is_packed: bool
) -> tuple[StartReport, PackageResult | None]:
    """Start the recipe. With `--programs auto`, start with jit, and then build packages.

    `builds`: whether packages may be built; otherwise those in the folder are returned. None: the recipe says which
    programs are used, or none may be built. `is_packed`: whether the caller then packs the folder. Raises
    IntegrityError if the folder has damaged packages, which later starts would refuse.
    """
    from tcdeploy.start.prepare import prepare

    is_auto = recipe.programs == "auto"
    started = dataclasses.replace(recipe, programs="jit") if is_auto else recipe
    deployment = prepare(started, progress, trusted_keys=trusted_keys)
    report = deployment.report()
    del deployment
    from tcdeploy.start.deployment import release_memory
    from tcdeploy.start.package_build import build_packages

    builds_now = is_auto and builds and recipe.compile and not recipe.require_signed and report.is_recorded
    if builds_now or is_packed:
        # Both start the model again, in another process on the same GPU. Otherwise this process is about to end, and
        # the two collections of all objects, 0.8 s, are left out.
        release_memory()
    if builds_now:
        packages = build_packages(recipe, report.planned, report.cache_dir, progress, trusted_keys)
    elif is_auto and not builds:
        packages = _find_packages(recipe, report, trusted_keys)
    else:
        return report, None
    if packages.is_damaged:
        raise IntegrityError(
            packages.failure, "later starts fail too; to build the packages again: --on-bad-cache rebuild"
        )
    if packages.failure:
        not_built = "packages were not built: " if builds else ""
        progress.message(f"warning: later starts use jit programs: {not_built}{packages.failure}")
    return report, packages


def _find_packages(recipe: Recipe, report: StartReport, trusted_keys: Path | None) -> PackageResult:
    """The packages that a later start with this recipe uses."""
    from tcdeploy.cache.folder.layout import manifest_path
    from tcdeploy.cache.record.manifest import read_manifest
    from tcdeploy.cache.record.unlisted import is_damaged
    from tcdeploy.start.decide import resolve_programs
    from tcdeploy.start.package_build import PackageResult
    from tcdeploy.start.planned import PlannedModel, StartRequest

    planned = cast(PlannedModel, report.planned)  # a start with jit programs has the model's code
    policy = StartRequest(recipe, trusted_keys=trusted_keys).signing_policy
    plan = resolve_programs(dataclasses.replace(planned, recipe=recipe), policy=policy).plan
    if plan.programs != "aot":
        [reason] = [decision.reason for decision in plan.decisions if decision.name == "programs"]
        return PackageResult("", 0.0, 0, reason)
    if is_damaged(plan.cache_dir, plan.key, policy.trusted_keys):
        return PackageResult("", 0.0, 0, f"the packages of plan {plan.key} are damaged", is_damaged=True)
    manifest = read_manifest(manifest_path(plan.cache_dir, plan.key))
    return PackageResult(plan.key, 0.0, manifest.total_bytes if manifest is not None else 0)


def filled_plans(report: StartReport, packages: PackageResult | None) -> list[str]:
    """The keys of the plans that `fill_cache` has left in `report.cache_dir`, which may be a private copy."""
    has_packages = packages is not None and packages.plan_key and report.cache_dir == report.plan.cache_dir
    return [report.plan.key, *([packages.plan_key] if packages is not None and has_packages else [])]


def _target(name_or_file: str | None) -> GPUDescription | None:
    from tcdeploy.planning.gpu_description import read_gpu_description

    return None if name_or_file is None else read_gpu_description(name_or_file)


def _with_missed_shapes(
    recipe: Recipe, path: str, dry_run: bool = False, target: GPUDescription | None = None
) -> Recipe:
    from tcdeploy.server.observe.missed_shapes import read_missed_shapes, with_missed_shapes
    from tcdeploy.start.decide import decide

    plan = decide(recipe, is_dry_run=dry_run, needs_weights=False, target=target).plan
    return with_missed_shapes(recipe, plan, read_missed_shapes(path))


def _enforce_hits(deployment: StartReport, packages: PackageResult | None) -> None:
    missed = [
        record.bucket if record.cache_misses else f"{record.bucket} (only {record.kernels_compiled} kernels)"
        for record in deployment.records
        if record.outcome in ("miss", "uncached")
    ]
    if unknown := [record.bucket for record in deployment.records if record.outcome == "unknown"]:
        raise ThresholdError(
            f"cache hits cannot be counted with this version of torch, so {', '.join(unknown)} may have compiled",
            "the warnings above name what is missing; install a tested version of torch",
        )
    if missed:
        state = "they are in the cache now" if deployment.is_recorded else "they are still not in the cache"
        hint = f"{state}; in CI, restore the cache folder of an earlier `tcdeploy warm`"
        if packages is not None and packages.plan_key:
            hint = "these are jit programs; to start from the packages in the folder instead, add --programs aot"
        raise ThresholdError(
            f"{len(missed)} of {len(deployment.records)} buckets had to compile: {', '.join(missed)}", hint
        )


def _require_record(deployment: StartReport) -> None:
    if not deployment.is_recorded:
        names = [record.bucket for record in deployment.records if record.outcome == "uncached"]
        raise CompileError(
            f"torch did not store the programs of {', '.join(names)}, so the plan is not in {deployment.cache_dir}",
            "unset variables that change torch.compile, such as TORCHINDUCTOR_FREEZING, and run again",
        )
