"""Verifies bundles and cache folders: their bytes, their signers, and the tokens that they compute.

`verify_bundle` and `verify_folder` read every byte and execute nothing. `compare_top_tokens` compares a start on this
machine with the packing machine: the manifest holds the eager model's greedy tokens for each bucket's fixed inputs, and
the compiled buckets must reproduce them here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tcdeploy.bundle.container import read_files
from tcdeploy.bundle.unpack import open_bundle
from tcdeploy.cache.files.records import FileRecord, find_damage
from tcdeploy.cache.folder.layout import BUNDLES_DIR, HEADER_SUFFIX, OWN_NAMES, manifest_path, stored_header_path
from tcdeploy.cache.folder.leases import shared_folder_lock
from tcdeploy.cache.record.bundle_header import CheckedHeader, parse_header
from tcdeploy.cache.record.manifest import Manifest, no_plan_error, read_manifest, read_manifests
from tcdeploy.cache.record.provenance import (
    SigningPolicy,
    check_manifest,
    check_manifests,
    files_made_here,
    read_stored_bundle,
    read_stored_header,
)
from tcdeploy.cache.record.unlisted import unlisted_files
from tcdeploy.cache.trust.ownership import check_no_links
from tcdeploy.cache.trust.signing import TrustedKey
from tcdeploy.errors import IntegrityError, MismatchError
from tcdeploy.planning.bucket_record import BLIND, BucketRecord
from tcdeploy.planning.environment import Environment, is_same_model, parse_environment

# Compiled and eager models may pick different tokens if two are almost equally likely; this bounds the difference.
LOGPROB_TOLERANCE_NATS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}


@dataclass(frozen=True)
class VerifiedPlan:
    """A plan whose files all match their records.

    For a plan that was built on a machine without its GPU, `built_for` names that GPU, `untimed_choices` is the number
    of choices that the build could not time, and `run_on` names the GPU and the driver of the last recorded start
    ("" before the first start). For other plans, they are "", 0 and "".

    For a plan from a bundle, `paths_not_from_bundle` lists its files that the bundle does not contain, because a later
    start compiled them; `files_not_from_bundle` is their number.
    """

    plan_key: str
    model: str
    files: int
    bytes: int
    signer: TrustedKey | None
    is_from_bundle: bool
    files_not_from_bundle: int = 0
    paths_not_from_bundle: tuple[str, ...] = ()
    built_for: str = ""
    run_on: str = ""
    untimed_choices: int = 0


@dataclass(frozen=True)
class BucketReplay:
    """Greedy tokens of one bucket here compared with the packer's; the log-probability difference is in nats."""

    bucket: str
    rows: int
    mismatched_tokens: int
    max_logprob_difference: float
    passed: bool
    reason: str = ""


def verify_bundle(path: Path, trusted_keys: Path, allow_unsigned: bool = False) -> list[VerifiedPlan]:
    """Verify the signature and every byte of a bundle. Raises TrustError, IntegrityError and MismatchError."""
    opened = open_bundle(path, trusted_keys, allow_unsigned)
    for _, chunks in read_files(path, opened.signed_header, opened.header.payload_files):
        for _ in chunks:
            pass
    plans = [dataclasses.replace(opened, header=opened.header.of_plan(key)) for key in opened.header.manifests]
    return [_verified_plan(plan.header.manifest, plan) for plan in plans]


def verify_folder(
    folder: Path, trusted_keys: Path, allow_unsigned: bool = False, require_signed: bool = False
) -> list[VerifiedPlan]:
    """Verify all files of all plans in a folder. Plans from bundles are also compared with the signed headers.

    `require_signed` refuses plans and files that are not from a signed bundle. Waits for a process that adds or removes
    files. Raises TrustError, IntegrityError, UsageError for a folder without a plan, MismatchError if all its plans are
    of other versions of tcdeploy, and TcdeployError if another process holds the folder for too long.
    """
    check_no_links(folder, OWN_NAMES)
    plans = []
    with shared_folder_lock(folder):
        for key, manifest in read_manifests(folder).items():
            bundle = read_stored_bundle(folder, key, trusted_keys, allow_unsigned)
            _check_files(folder, bundle.files if bundle is not None else ())
            check_manifest(folder, key, manifest, bundle)
            _check_files(folder, manifest.files)
            if require_signed:
                check_manifests(str(folder), key, {key: manifest}, SigningPolicy(trusted_keys, require_signed))
            plans.append(_verified_plan(manifest, bundle))
        _check_stored_headers(folder)
        if unlisted := unlisted_files(folder):
            raise IntegrityError(
                f"{folder / unlisted[0]} is not listed in any manifest",
                f"no start uses it; delete all such files: tcdeploy cache gc {folder} --unlisted",
            )
    if not plans:
        raise no_plan_error(folder)
    return plans


def _check_files(folder: Path, files: Iterable[FileRecord]) -> None:
    files = list(files)
    check_no_links(folder, (Path(file.path).parent.as_posix() for file in files))
    if damage := find_damage(folder, files):
        count = f" ({len(damage)} files are damaged)" if len(damage) > 1 else ""
        raise IntegrityError(
            f"{folder / damage[0].path} {damage[0].reason}{count}",
            "unpack the bundle again, or compile again: "
            f"tcdeploy warm MODEL --cache-dir {folder} --on-bad-cache rebuild",
        )


def packed_manifest(folder: Path, plan_key: str) -> Manifest:
    """The manifest that the packing machine wrote, for a plan from a bundle; else the manifest in the folder.

    They differ, because each start rewrites the manifest in the folder.
    """
    stored_header = read_stored_header(folder, plan_key)
    if stored_header is not None:
        return parse_header(stored_header, str(stored_header_path(folder, plan_key))).manifests[plan_key]
    manifest = read_manifest(manifest_path(folder, plan_key))
    assert manifest is not None, "the caller has verified this plan"
    return manifest


def _check_stored_headers(folder: Path) -> None:
    for path in (folder / BUNDLES_DIR).glob(f"*{HEADER_SUFFIX}"):
        if not manifest_path(folder, path.stem).exists():
            raise IntegrityError(
                f"plan {path.stem} was unpacked here, but its manifest is missing", "unpack the bundle again"
            )


def _verified_plan(manifest: Manifest, bundle: CheckedHeader | None) -> VerifiedPlan:
    plan, size = manifest.plan, sum(file.bytes for file in manifest.files)
    made_here = files_made_here(manifest.files, bundle) if bundle is not None else []
    blind = manifest.blind
    return VerifiedPlan(
        plan["key"], plan["model"], files=len(manifest.files), bytes=size,
        signer=bundle.signer if bundle is not None else None, is_from_bundle=bundle is not None,
        files_not_from_bundle=len(made_here), paths_not_from_bundle=tuple(made_here),
        built_for=blind.target.name if blind else "",
        run_on=_describe_gpu(manifest) if blind and manifest.has_run else "",
        untimed_choices=len(blind.choices) if blind else 0,
    )  # fmt: skip


def _describe_gpu(manifest: Manifest) -> str:
    """The GPU and the driver of the start that wrote the manifest."""
    environment = parse_environment(manifest.environment)
    driver = f", driver {environment.driver}" if environment.driver else ""
    return f"{environment.gpu or 'a CPU'}{driver}"


def check_same_gpu(packed: Manifest, here: Environment) -> None:
    """Raise MismatchError unless the plan was made for the first GPU model of `here`, or for a CPU if it has no GPU."""
    gpus, gpus_here = parse_environment(packed.environment).gpus[:1], here.gpus[:1]
    if len(gpus) != len(gpus_here) or not all(map(is_same_model, gpus, gpus_here)):
        there, found = (gpus[0].name if gpus else "a CPU" for gpus in (gpus, gpus_here))
        raise MismatchError(
            f"plan {packed.plan['key']} was made for {there}, but here it would run on {found}",
            "repeat the command on such a machine, or omit --run to check only hashes and signatures",
        )


def compare_top_tokens(packed: Manifest, local_records: tuple[BucketRecord, ...]) -> list[BucketReplay]:
    """Compare, per bucket, the compiled model's tokens on this machine with the eager model's on the packer's."""
    records = {record.bucket: record for record in local_records}
    return [
        _compare_bucket(record, records.get(record.bucket), str(packed.plan["compute_dtype"]))
        for record in packed.buckets
        if record.outcome != BLIND  # its tokens were not computed
    ]


def _compare_bucket(packed: BucketRecord, local: BucketRecord | None, dtype: str) -> BucketReplay:
    expected = packed.eager_greedy_tokens
    rows = len(expected.tokens)
    if local is None or local.greedy_tokens.inputs_sha256 != expected.inputs_sha256:
        return BucketReplay(packed.bucket, rows, 0, 0.0, False, "it was not run here with the packer's inputs")
    actual = local.greedy_tokens
    difference = max(abs(a - b) for a, b in zip(expected.logprobs, actual.logprobs, strict=True))
    mismatched = sum(a != b for a, b in zip(expected.tokens, actual.tokens, strict=True))
    passed = difference <= LOGPROB_TOLERANCE_NATS[dtype]
    reason = "" if passed else "its tokens differ from the packed model's: other weights, or a miscompiled program"
    return BucketReplay(packed.bucket, rows, mismatched, difference, passed, reason)
