"""Reports of `tcdeploy cache` on stdout: tables and sentences, or one JSON document."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tcdeploy.cache.inventory import kind_of
from tcdeploy.cache.record.manifest import read_other_versions
from tcdeploy.cli.display import json_document, show_sentence, show_table
from tcdeploy.cli.tables import Cells, Column, Table, optional, tabulate

if TYPE_CHECKING:
    from tcdeploy.bundle.fetch import FetchResult
    from tcdeploy.bundle.pack import PackResult
    from tcdeploy.bundle.unpack import UnpackResult
    from tcdeploy.bundle.verify import BucketReplay, VerifiedPlan
    from tcdeploy.bundle.why import Comparison, Forecast
    from tcdeploy.cache.inventory import CachedPlan, GcResult, UnfinishedPlan
    from tcdeploy.cache.record.manifest import Manifest
    from tcdeploy.cache.trust.signing import TrustedKey
    from tcdeploy.planning.environment import Difference
    from tcdeploy.remote.transfer import PushResult

MAX_NAMED = 3  # reasons of a miss, and files that a plan has and its bundle does not
MAX_LISTED_FILES = 20  # of each kind, in a comparison
Usage = dict[str, tuple[int, int]]  # per kind, the number of files and their bytes
USAGE_CELLS: Cells = (
    (Column("kind", "name"), lambda item: item[0]),
    (Column("files"), lambda item: str(item[1][0])),
    (Column("MB"), lambda item: _mb(item[1][1])),
)
REPLAY_CELLS: Cells = (
    (Column("bucket", "name"), lambda replay: replay.bucket),
    (Column("rows", rank=1), lambda replay: str(replay.rows)),
    (Column("mismatched tokens"), lambda replay: str(replay.mismatched_tokens)),
    (Column("max |dlogprob|"), lambda replay: f"{replay.max_logprob_difference:.1e}"),
    (Column("outputs", "text"), lambda replay: "as packed" if replay.passed else replay.reason),
)
FORECAST_CELLS: Cells = (
    (Column("bucket", "name"), lambda bucket: bucket.bucket),
    (Column("forecast", "name"), lambda bucket: "hit" if bucket.is_hit else "miss"),
    (
        Column("cost"),
        lambda bucket: optional(bucket.miss_seconds, ".1f", "about {} s" if bucket.is_estimate else "{} s"),
    ),
    (Column("reasons", "text"), lambda bucket: _join(bucket.reasons, " and {} more")),
)
PLAN_CELLS: Cells = (
    (Column("plan", "name"), lambda plan: plan.plan_key),
    (Column("model", "name"), lambda plan: plan.model),
    (Column("dtype", "name", rank=2), lambda plan: plan.compute_dtype),
    (Column("programs", "name", rank=3), lambda plan: plan.programs),
    (Column("mode", "name", rank=4), lambda plan: plan.mode),
    (Column("buckets", "text", rank=1), lambda plan: " ".join(plan.buckets)),
    (Column("files", rank=6), lambda plan: str(plan.files)),
    (Column("MB"), lambda plan: _mb(plan.bytes)),
    (Column("unique MB", rank=7), lambda plan: _mb(plan.unique_bytes)),
    (Column("last start"), lambda plan: _age(plan.age_seconds)),
    (Column("cold s", rank=5), lambda plan: f"{plan.cold_seconds:.0f}"),
    (Column("state", "text"), lambda plan: _plan_state(plan)),
)


def show_packed(packed: PackResult, manifests: Iterable[Manifest], json: bool) -> None:
    usage: Usage = {}
    for file in {file for manifest in manifests for file in manifest.files}:
        files, size = usage.get(kind_of(file.path), (0, 0))
        usage[kind_of(file.path)] = (files + 1, size + file.bytes)
    if json:
        print(json_document("cache pack", **vars(packed), kinds=usage_document(usage)))
        return
    show_table(tabulate(sorted(usage.items(), key=lambda item: -item[1][1]), USAGE_CELLS))
    show_sentence(
        f"{packed.path}: {_mb(packed.packed_bytes)} MB, of which {_mb(packed.header_bytes)} MB header; "
        f"{packed.files} files, {_mb(packed.unpacked_bytes)} MB unpacked; "
        f"{_plans(packed.plan_key, *packed.other_plans)}"
    )


def show_unpacked(unpacked: UnpackResult, folder: Path, json: bool) -> None:
    if json:
        print(json_document("cache unpack", **vars(unpacked)))
        return
    outcome = "already present" if unpacked.already_present else "unpacked"
    plans, size = _plans(unpacked.plan_key, *unpacked.other_plans), f"{_mb(unpacked.bytes)} MB"
    show_sentence(f"{plans} {outcome}: {unpacked.files} files, {size} in {folder}; {_format_signer(unpacked.signer)}")
    _show_kept_and_replaced(unpacked, sys.stdout)


def _show_kept_and_replaced(unpacked: UnpackResult, out: TextIO) -> None:
    """Print what the folder keeps although the bundle differs, and what the bundle has replaced."""
    if unpacked.measured_plans:
        kept = "the measurements of this build's first start in the folder are kept"
        show_sentence(f"{kept}; to discard them: --allow-rollback", out)
    if plans := unpacked.unmeasured_plans:
        discarded = "the measurements of earlier starts in the folder are discarded"
        show_sentence(f"{discarded} ({_plans(*plans)}): no start has run the unpacked build", out)
    if plans := unpacked.signed_plans:
        show_sentence(f"the folder keeps its trusted signature, because the files are the same ({_plans(*plans)})", out)
    if plans := unpacked.unsigned_plans:
        show_sentence(
            f"a bundle with a trusted signature is replaced by one without ({_plans(*plans)}): starts with "
            "--require-signed refuse the new one",
            out,
        )


def _plans(plan_key: str, *others: str) -> str:
    return f"plans {', '.join([plan_key, *others])}" if others else f"plan {plan_key}"


def show_fetched(fetched: FetchResult) -> None:
    """Printed to stderr with the progress: stdout holds the report of the command itself."""
    if not fetched.url:
        print(f"cache: plan {fetched.plan_key} is already present, nothing fetched", file=sys.stderr)
        return
    size, seconds = _mb(fetched.bytes), f"{fetched.seconds:.1f} s"
    print(f"cache: {fetched.url}, {size} MB in {seconds}, {_format_signer(fetched.signer)}", file=sys.stderr)
    if fetched.unpacked is not None:
        _show_kept_and_replaced(fetched.unpacked, sys.stderr)


def format_pushed(pushed: PushResult) -> str:
    return f"{pushed.url} {'already present' if pushed.already_present else 'pushed'}, {_mb(pushed.bytes)} MB"


def show_verified(
    target: Path, verified: list[VerifiedPlan], replays: dict[str, list[BucketReplay]], skipped: dict[str, str],
    json: bool,
) -> None:  # fmt: skip
    """`replays`: per plan key, the comparison of each bucket's outputs with the packed ones.

    `skipped`: per plan key, why the plan was not run.
    """
    if json:
        print(json_document("cache verify", plans=verified, replayed=replays, skipped=skipped))
        return
    for plan in verified:
        show_sentence(
            f"{plan.plan_key} {plan.model}: {plan.files} files, {_mb(plan.bytes)} MB verified; {_provenance(plan)}"
        )
    if any(replays.values()):
        show_table(tabulate([replay for of_plan in replays.values() for replay in of_plan], REPLAY_CELLS))
    for reason in skipped.values():
        show_sentence(f"not run: {reason}")
    print(f"{target} is intact")


def _provenance(plan: VerifiedPlan) -> str:
    parts = []
    if plan.built_for:
        run = f"then run on {plan.run_on}" if plan.run_on else "not run"
        parts = [f"built for {plan.built_for} without that GPU ({plan.untimed_choices} choices not timed), {run}"]
    if plan.is_from_bundle:
        parts.append(_format_signer(plan.signer))
    if paths := plan.paths_not_from_bundle:
        parts.append(f"{len(paths)} files compiled on this machine: {_join(paths, ', ...')}")
    return "; ".join(parts) or "compiled on this machine"


def show_forecast(forecast: Forecast, json: bool) -> None:
    if json:
        print(json_document("cache why", **vars(forecast), miss_seconds=forecast.miss_seconds))
        return
    show_differences(forecast.differences, sys.stdout)
    show_table(tabulate(forecast.buckets, FORECAST_CELLS))


def show_differences(differences: Sequence[Difference], out: TextIO) -> None:
    if differences:
        show_table(difference_table(differences, "here", "in the cache"), out)


def difference_table(differences: Sequence[Difference], first: str, second: str) -> Table:
    columns = (Column("difference", "name"), Column(first, "text"), Column(second, "text"))
    return Table(columns, [(difference.name, difference.here, difference.there) for difference in differences])


def show_plans(folder: Path, plans: Sequence[CachedPlan], unfinished: Sequence[UnfinishedPlan], json: bool) -> None:
    if json:
        print(json_document("cache ls", plans=plans, unfinished=unfinished))
        return
    if plans:
        show_table(tabulate(plans, PLAN_CELLS))
    else:
        show_sentence(f"no start has completed a plan in {folder}")
    for left in unfinished:
        show_sentence(
            f"plan {left.plan_key} is not complete; finished buckets or packages: {left.finished} ({left.files} files, "
            f"{_mb(left.bytes)} MB), which the next start of the plan reuses"
        )


def show_other_versions(folder: Path, verb: str) -> None:
    """Name on stderr the plans of other versions of tcdeploy, which this version has not `verb`."""
    if keys := sorted(read_other_versions(folder)):
        show_sentence(
            f"not {verb}: plans that another version of tcdeploy has warmed, and that this version cannot use: "
            f"{', '.join(keys)}; `tcdeploy cache gc` deletes them 24 hours after their last start",
            sys.stderr,
        )


def _plan_state(plan: CachedPlan) -> str:
    states = {
        "in use": plan.is_leased,
        "from a bundle": plan.is_from_bundle,
        "built without its GPU": plan.is_built_without_gpu,
        "not run yet": not plan.has_run,
        "no warm start yet": plan.has_run and not plan.was_warm,
    }
    return ", ".join(state for state, holds in states.items() if holds) or "-"


def usage_table(usage: Usage) -> Table:
    total = sum(files for files, _ in usage.values()), sum(size for _, size in usage.values())
    return tabulate([*usage.items(), ("total", total)], USAGE_CELLS)


def usage_document(usage: Usage) -> dict[str, Any]:
    return {kind: {"files": files, "bytes": size} for kind, (files, size) in usage.items()}


def show_removed(removed: GcResult, is_dry_run: bool, json: bool) -> None:
    if json:
        print(json_document("cache gc", **vars(removed), dry_run=is_dry_run))
        return
    for key, reason in removed.retained:
        show_sentence(f"{key} retained: {reason}")
    verb = "would remove" if is_dry_run else "removed"
    print(f"{verb} {len(removed.plan_keys)} plans, {removed.files} files, {_mb(removed.bytes)} MB")


def show_comparison(comparison: Comparison, json: bool) -> None:
    if json:
        print(json_document("cache diff", **vars(comparison)))
        return
    if comparison.differences:
        show_table(difference_table(comparison.differences, "first", "second"))
    paths_by_kind = {
        "only in the first": comparison.only_first,
        "only in the second": comparison.only_second,
        "changed": comparison.changed,
    }
    for kind, paths in paths_by_kind.items():
        for path in paths[:MAX_LISTED_FILES]:
            print(f"{kind}: {path}")
        if len(paths) > MAX_LISTED_FILES:
            print(f"{kind}: {len(paths) - MAX_LISTED_FILES} more")
    print(f"{comparison.same} files are identical")


def _format_signer(signer: TrustedKey | None) -> str:
    return f"signed by {signer.name}" if signer else "no trusted signature"


def _join(names: Sequence[str], more: str) -> str:
    """The first names. `more`: how others are mentioned, with {} for their number."""
    return ", ".join(names[:MAX_NAMED]) + (more.format(len(names) - MAX_NAMED) if len(names) > MAX_NAMED else "")


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f}"
