"""Reports of `tcdeploy cache` on stdout: tables and sentences, or one JSON document."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tcdeploy.cache.inventory import kind_of
from tcdeploy.cache.record.manifest import read_other_versions
from tcdeploy.cli.display import json_document, show_sentence, show_table
from tcdeploy.cli.tables import Column, Table

if TYPE_CHECKING:
    from tcdeploy.bundle.fetch import FetchResult
    from tcdeploy.bundle.pack import PackResult
    from tcdeploy.bundle.unpack import UnpackResult
    from tcdeploy.bundle.verify import BucketReplay, VerifiedPlan
    from tcdeploy.bundle.why import Comparison, Forecast
    from tcdeploy.cache.inventory import CachedPlan, GcResult
    from tcdeploy.cache.record.manifest import Manifest
    from tcdeploy.cache.trust.signing import TrustedKey
    from tcdeploy.planning.environment import Difference
    from tcdeploy.remote.transfer import PushResult

MAX_NAMED_FILES = 3  # of the files that a plan has and its bundle does not
MAX_LISTED_FILES = 20  # of each kind, in a comparison
KIND_COLUMNS = (Column("kind", "name"), Column("files"), Column("MB"))
REPLAY_COLUMNS = (
    Column("bucket", "name"),
    Column("rows", rank=1),
    Column("mismatched tokens"),
    Column("max |dlogprob|"),
    Column("outputs", "text"),
)
FORECAST_COLUMNS = (Column("bucket", "name"), Column("forecast", "name"), Column("cost"), Column("reasons", "text"))
PLAN_COLUMNS = (
    Column("plan", "name"),
    Column("model", "name"),
    Column("dtype", "name", rank=2),
    Column("mode", "name", rank=3),
    Column("buckets", "text", rank=1),
    Column("files", rank=5),
    Column("MB"),
    Column("unique MB", rank=6),
    Column("last start"),
    Column("cold s", rank=4),
    Column("state", "text"),
)


def show_packed(packed: PackResult, manifest: Manifest, json: bool) -> None:
    sizes_by_kind: dict[str, list[int]] = {}
    for file in manifest.files:
        sizes_by_kind.setdefault(kind_of(file.path), []).append(file.bytes)
    if json:
        kinds = {kind: {"files": len(sizes), "bytes": sum(sizes)} for kind, sizes in sizes_by_kind.items()}
        return _print_json("cache pack", packed, kinds=kinds)
    largest_first = sorted(sizes_by_kind.items(), key=lambda item: -sum(item[1]))
    show_table(Table(KIND_COLUMNS, [(kind, str(len(sizes)), _mb(sum(sizes))) for kind, sizes in largest_first]))
    show_sentence(
        f"{packed.path}: {_mb(packed.packed_bytes)} MB, of which {_mb(packed.header_bytes)} MB header; "
        f"{packed.files} files, {_mb(packed.unpacked_bytes)} MB unpacked; plan {packed.plan_key}"
    )
    return None


def show_unpacked(unpacked: UnpackResult, folder: Path, json: bool) -> None:
    if json:
        return _print_json("cache unpack", unpacked)
    outcome = "already present" if unpacked.already_present else "unpacked"
    show_sentence(
        f"plan {unpacked.plan_key} {outcome}: {unpacked.files} files, {_mb(unpacked.bytes)} MB in {folder}; "
        f"{_format_signer(unpacked.signer)}"
    )
    return None


def show_fetched(fetched: FetchResult) -> None:
    """Printed to stderr with the progress: stdout holds the report of the command itself."""
    if not fetched.url:
        print(f"cache: plan {fetched.plan_key} is already present, nothing fetched", file=sys.stderr)
        return
    size, seconds = _mb(fetched.bytes), f"{fetched.seconds:.1f} s"
    print(f"cache: {fetched.url}, {size} MB in {seconds}, {_format_signer(fetched.signer)}", file=sys.stderr)


def show_cache_pushed(pushed: PushResult) -> None:
    print(f"cache: {_format_pushed(pushed)}", file=sys.stderr)


def show_pushed(pushed: PushResult, json: bool) -> None:
    _show("cache push", _format_pushed(pushed), json, **dataclasses.asdict(pushed))


def _format_pushed(pushed: PushResult) -> str:
    return f"{pushed.url} {'already present' if pushed.already_present else 'pushed'}, {_mb(pushed.bytes)} MB"


def show_pulled(url: str, path: Path, json: bool) -> None:
    """`url` contains no secrets."""
    size = path.stat().st_size
    _show("cache pull", f"{path}: {size} bytes, digest verified", json, url=url, path=str(path), bytes=size)


def show_bundles(urls: list[str], plan_key: str, json: bool) -> None:
    """`urls` contain no secrets."""
    if urls or json:
        _show("cache find", "\n".join(urls), json, plan_key=plan_key, bundles=[{"url": url} for url in urls])


def show_key_pair(name: Path, fingerprint: str, json: bool) -> None:
    secret, public = f"{name}.key", f"{name}.pub"
    text = f"{secret} {public} {fingerprint}"
    _show("cache keygen", text, json, secret_key=secret, public_key=public, fingerprint=fingerprint)


def show_signed(bundle: Path, secret_key: Path, json: bool) -> None:
    _show("cache sign", f"{bundle} is signed", json, path=str(bundle), secret_key=str(secret_key))


def show_trusted(key: TrustedKey, json: bool) -> None:
    _show("cache trust", f"{key.name} {key.fingerprint} is trusted", json, signer=dataclasses.asdict(key))


def show_verified(
    target: Path, verified: list[VerifiedPlan], replays: dict[str, list[BucketReplay]], json: bool
) -> None:
    """`replays`: per plan key, the comparison of each bucket's outputs with the packed ones."""
    if json:
        plans = [dataclasses.asdict(plan) for plan in verified]
        replayed = {key: [dataclasses.asdict(replay) for replay in of_plan] for key, of_plan in replays.items()}
        print(json_document("cache verify", plans=plans, replayed=replayed))
        return
    for plan in verified:
        show_sentence(
            f"{plan.plan_key} {plan.model}: {plan.files} files, {_mb(plan.bytes)} MB verified; {_provenance(plan)}"
        )
    if any(replays.values()):
        show_table(replay_table([replay for of_plan in replays.values() for replay in of_plan]))
    print(f"{target} is intact")


def _provenance(plan: VerifiedPlan) -> str:
    if not plan.is_from_bundle:
        return "compiled on this machine"
    paths = plan.paths_not_from_bundle
    names = ", ".join(paths[:MAX_NAMED_FILES]) + (", ..." if len(paths) > MAX_NAMED_FILES else "")
    other_files = f"; {len(paths)} files compiled on this machine: {names}" if paths else ""
    return _format_signer(plan.signer) + other_files


def replay_table(replays: Sequence[BucketReplay]) -> Table:
    return Table(REPLAY_COLUMNS, [_replay_row(replay) for replay in replays])


def _replay_row(replay: BucketReplay) -> tuple[str, ...]:
    outcome = "as packed" if replay.passed else replay.reason
    difference = f"{replay.max_logprob_difference:.1e}"
    return replay.bucket, str(replay.rows), str(replay.mismatched_tokens), difference, outcome


def show_forecast(forecast: Forecast, json: bool) -> None:
    if json:
        return _print_json("cache why", forecast, miss_seconds=forecast.miss_seconds)
    show_differences(forecast.differences, sys.stdout)
    show_table(forecast_table(forecast))
    return None


def forecast_table(forecast: Forecast) -> Table:
    rows = [
        (
            bucket.bucket,
            "hit" if bucket.is_hit else "miss",
            _format_cost(bucket.miss_seconds, bucket.is_estimate),
            _format_reasons(bucket.reasons),
        )
        for bucket in forecast.buckets
    ]
    return Table(FORECAST_COLUMNS, rows)


def _format_reasons(reasons: Sequence[str]) -> str:
    more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return ", ".join(reasons[:3]) + more


def _format_cost(seconds: float | None, is_estimate: bool) -> str:
    return "-" if seconds is None else f"{'about ' if is_estimate else ''}{seconds:.1f} s"


def show_differences(differences: Sequence[Difference], out: TextIO) -> None:
    if not differences:
        return
    show_table(difference_table(differences, "here", "in the cache"), out)


def difference_table(differences: Sequence[Difference], first: str, second: str) -> Table:
    columns = (Column("difference", "name"), Column(first, "text"), Column(second, "text"))
    return Table(columns, [(difference.name, difference.here, difference.there) for difference in differences])


def show_plans(plans: list[CachedPlan], json: bool) -> None:
    if json:
        print(json_document("cache ls", plans=[dataclasses.asdict(plan) for plan in plans]))
        return
    show_table(plans_table(plans))


def show_other_versions(folder: Path, verb: str) -> None:
    """Name on stderr the plans of other versions of tcdeploy, which this version has not `verb`."""
    if keys := sorted(read_other_versions(folder)):
        show_sentence(
            f"not {verb}: plans that another version of tcdeploy has warmed, and that this version cannot use: "
            f"{', '.join(keys)}; `tcdeploy cache gc` deletes them 24 hours after their last start",
            sys.stderr,
        )


def plans_table(plans: Sequence[CachedPlan]) -> Table:
    rows = [
        (
            plan.plan_key,
            plan.model,
            plan.compute_dtype,
            plan.mode,
            " ".join(plan.buckets),
            str(plan.files),
            _mb(plan.bytes),
            _mb(plan.unique_bytes),
            _age(plan.age_seconds),
            f"{plan.cold_seconds:.0f}",
            _plan_state(plan),
        )
        for plan in plans
    ]
    return Table(PLAN_COLUMNS, rows)


def _plan_state(plan: CachedPlan) -> str:
    states = {"in use": plan.is_leased, "from a bundle": plan.is_from_bundle, "no warm start yet": not plan.was_warm}
    return ", ".join(state for state, holds in states.items() if holds) or "-"


def show_usage(usage: dict[str, tuple[int, int]], json: bool) -> None:
    """`usage`: per kind, the number of files and their bytes."""
    if json:
        kinds = {kind: {"files": files, "bytes": size} for kind, (files, size) in usage.items()}
        print(json_document("cache du", kinds=kinds))
        return
    show_table(usage_table(usage))


def usage_table(usage: dict[str, tuple[int, int]]) -> Table:
    rows = [(kind, str(files), _mb(size)) for kind, (files, size) in usage.items()]
    total_files, total_bytes = sum(files for files, _ in usage.values()), sum(size for _, size in usage.values())
    return Table(KIND_COLUMNS, [*rows, ("total", str(total_files), _mb(total_bytes))])


def show_removed(removed: GcResult, is_dry_run: bool, json: bool) -> None:
    if json:
        return _print_json("cache gc", removed, dry_run=is_dry_run)
    for key, reason in removed.retained:
        show_sentence(f"{key} retained: {reason}")
    summary = f"{len(removed.plan_keys)} plans, {removed.files} files, {_mb(removed.bytes)} MB"
    print(f"would remove {summary}" if is_dry_run else f"removed {summary}")
    return None


def show_comparison(comparison: Comparison, json: bool) -> None:
    if json:
        return _print_json("cache diff", comparison)
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
    return None


def _format_signer(signer: TrustedKey | None) -> str:
    return f"signed by {signer.name}" if signer else "no trusted signature"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f}"


def _show(command: str, text: str, json: bool, **values: Any) -> None:
    print(json_document(command, **values) if json else text)


def _print_json(command: str, result: Any, **more: Any) -> None:
    content = {**dataclasses.asdict(result), **more}
    print(
        json_document(command, **{key: str(item) if isinstance(item, Path) else item for key, item in content.items()})
    )
