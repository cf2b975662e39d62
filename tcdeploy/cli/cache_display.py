"""The reports of `tcdeploy cache`: tables and sentences on stdout, or one JSON document."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tcdeploy.cli.display import json_document, show_table

if TYPE_CHECKING:
    from tcdeploy.bundle.compare import Comparison
    from tcdeploy.bundle.fetch import FetchResult
    from tcdeploy.bundle.pack import PackResult
    from tcdeploy.bundle.unpack import UnpackResult
    from tcdeploy.bundle.verify import BucketReplay, VerifiedPlan
    from tcdeploy.bundle.why import Forecast
    from tcdeploy.cache.inventory import CachedPlan, GcResult
    from tcdeploy.cache.manifest import Manifest
    from tcdeploy.planning.environment import Difference
    from tcdeploy.remote.transfer import PushResult

MAX_LISTED_FILES = 20  # files that a comparison names of each kind


def show_packed(packed: PackResult, manifest: Manifest, json: bool) -> None:
    from tcdeploy.cache.inventory import kind_of

    kinds: dict[str, list[int]] = {}
    for file in manifest.files:
        kinds.setdefault(kind_of(file.path), []).append(file.bytes)
    if json:
        by_kind = {kind: {"files": len(sizes), "bytes": sum(sizes)} for kind, sizes in kinds.items()}
        return _print_json("cache pack", packed, kinds=by_kind)
    ordered = sorted(kinds.items(), key=lambda item: -sum(item[1]))
    show_table(("what", "files", "MB"), [(kind, str(len(sizes)), _mb(sum(sizes))) for kind, sizes in ordered])
    print(
        f"{packed.path}: {_mb(packed.packed_bytes)} MB for {packed.files} files of {_mb(packed.unpacked_bytes)} MB, "
        f"{_mb(packed.header_bytes)} of it the header; plan {packed.plan_key}"
    )
    return None


def show_unpacked(unpacked: UnpackResult, folder: Path, json: bool) -> None:
    if json:
        return _print_json("cache unpack", unpacked)
    done = "was there already" if unpacked.already_present else "is there now"
    print(
        f"plan {unpacked.plan_key} {done}: {unpacked.files} files, {_mb(unpacked.bytes)} MB in {folder}; "
        f"{_signer_text(unpacked.signer)}"
    )
    return None


def show_fetched(fetched: FetchResult) -> None:
    """On stderr, beside the progress: the report that follows on stdout is of the start."""
    if not fetched.url:
        print(f"cache: the plan {fetched.plan_key} is here already, nothing was fetched", file=sys.stderr)
        return
    size, seconds = _mb(fetched.bytes), f"{fetched.seconds:.1f} s"
    print(f"cache: {fetched.url}, {size} MB in {seconds}, {_signer_text(fetched.signer)}", file=sys.stderr)


def show_cache_pushed(pushed: PushResult) -> None:
    done = "was there already" if pushed.already_present else "is there now"
    print(f"cache: {pushed.url} {done}, {_mb(pushed.bytes)} MB", file=sys.stderr)


def show_pushed(pushed: PushResult, json: bool) -> None:
    if json:
        return _print_json("cache push", pushed)
    done = "was there already" if pushed.already_present else "is there now"
    print(f"{pushed.url} {done}, {_mb(pushed.bytes)} MB")
    return None


def show_verified(
    target: Path, verified: list[VerifiedPlan], replayed: dict[str, list[BucketReplay]], json: bool
) -> None:
    if json:
        plans = [dataclasses.asdict(one) for one in verified]
        answers = {key: [dataclasses.asdict(one) for one in found] for key, found in replayed.items()}
        print(json_document("cache verify", plans=plans, replayed=answers))
        return
    for one in verified:
        origin = _signer_text(one.signer) if one.is_from_bundle else "made here"
        origin += f", but {one.files_not_from_bundle} of them made here" if one.files_not_from_bundle else ""
        print(f"{one.plan_key} {one.model}: {one.files} files, {_mb(one.bytes)} MB, every byte as recorded; {origin}")
    rows = [_replayed_row(one) for found in replayed.values() for one in found]
    if rows:
        show_table(("bucket", "rows", "other tokens", "max |dlogprob|", "answers"), rows)
    print(f"{target} is whole")


def _replayed_row(one: BucketReplay) -> tuple[str, ...]:
    verdict = "as packed" if one.passed else one.reason
    return (one.bucket, str(one.rows), str(one.mismatched_tokens), f"{one.max_logprob_difference:.1e}", verdict)


def show_forecast(found: Forecast, json: bool) -> None:
    if json:
        return _print_json("cache why", found, miss_seconds=found.miss_seconds)
    show_differences(found.differences, sys.stdout)
    rows = [
        (
            one.bucket,
            "hit" if one.is_hit else "miss",
            _seconds(one.miss_seconds, one.is_estimate),
            _reasons(one.reasons),
        )
        for one in found.buckets
    ]
    show_table(("bucket", "forecast", "costs", "because of"), rows)
    return None


def _reasons(reasons: Sequence[str]) -> str:
    more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    return ", ".join(reasons[:3]) + more


def _seconds(seconds: float | None, is_estimate: bool) -> str:
    return "-" if seconds is None else f"{'some ' if is_estimate else ''}{seconds:.1f} s"


def show_differences(differences: Sequence[Difference], out: TextIO) -> None:
    if not differences:
        return
    rows = [(one.name, one.here, one.there) for one in differences]
    show_table(("differs", "here", "in the cache"), rows, right=False, out=out)


def show_plans(entries: list[CachedPlan], json: bool) -> None:
    if json:
        print(json_document("cache ls", plans=[dataclasses.asdict(entry) for entry in entries]))
        return
    rows = [
        (
            one.plan_key, one.model, one.dtype, one.mode, " ".join(one.buckets), str(one.files), _mb(one.bytes),
            _mb(one.unique_bytes), _age(one.age_seconds), f"{one.cold_seconds:.0f}", _state(one),
        )
        for one in entries
    ]  # fmt: skip
    headers = ("plan", "model", "dtype", "mode", "buckets", "files", "MB", "own MB", "last start", "cold s", "state")
    show_table(headers, rows)


def _state(entry: CachedPlan) -> str:
    words = {
        "in use": entry.is_leased, "from a bundle": entry.is_from_bundle, "not started again": not entry.was_warm,
    }  # fmt: skip
    return ", ".join(word for word, holds in words.items() if holds) or "-"


def show_usage(found: dict[str, tuple[int, int]], json: bool) -> None:
    if json:
        print(json_document("cache du", kinds={kind: {"files": n, "bytes": size} for kind, (n, size) in found.items()}))
        return
    rows = [(kind, str(files), _mb(size)) for kind, (files, size) in found.items()]
    total = (sum(files for files, _ in found.values()), sum(size for _, size in found.values()))
    show_table(("what", "files", "MB"), [*rows, ("all", str(total[0]), _mb(total[1]))])


def show_removed(removed: GcResult, is_dry_run: bool, json: bool) -> None:
    if json:
        return _print_json("cache gc", removed, dry_run=is_dry_run)
    for key, reason in removed.retained:
        print(f"{key} stays: {reason}")
    gone = f"{len(removed.plan_keys)} plans, {removed.files} files, {_mb(removed.bytes)} MB"
    print(f"would remove {gone}" if is_dry_run else f"removed {gone}")
    return None


def show_comparison(found: Comparison, json: bool) -> None:
    if json:
        return _print_json("cache diff", found)
    if found.differences:
        rows = [(one.name, one.here, one.there) for one in found.differences]
        show_table(("differs", "first", "second"), rows, right=False)
    kinds = {"only in the first": found.only_first, "only in the second": found.only_second, "other": found.changed}
    for kind, paths in kinds.items():
        for path in paths[:MAX_LISTED_FILES]:
            print(f"{kind}: {path}")
        if len(paths) > MAX_LISTED_FILES:
            print(f"{kind}: {len(paths) - MAX_LISTED_FILES} more")
    print(f"{found.same} files are the same")
    return None


def _signer_text(signer: Any) -> str:
    return f"signed by {signer.name}" if signer else "signed by nobody you trust"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f}"


def _print_json(command: str, record: Any, **more: Any) -> None:
    content = {**dataclasses.asdict(record), **more}
    print(json_document(command, **{key: str(one) if isinstance(one, Path) else one for key, one in content.items()}))
