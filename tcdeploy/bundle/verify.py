"""Is it what it was, who says so, and does it still compute the same?

`verify_bundle` and `verify_folder` read every byte and run none. `compare_top_tokens` is the last question: the manifest
holds what the eager model answered to each bucket's fixed inputs on the machine that packed it; a start on this machine
answers them through the compiled buckets, and the two must agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tcdeploy.bundle.container import read_files, read_signed_header
from tcdeploy.bundle.header import Header, parse_header
from tcdeploy.bundle.signing import TrustedKey, verify_signature
from tcdeploy.bundle.unpack import open_bundle
from tcdeploy.cache.contents import TOOLCHAIN_DIR, find_damage
from tcdeploy.cache.folder import BUNDLES_DIR, HEADER_SUFFIX, unlisted_files
from tcdeploy.cache.manifest import MANIFESTS_DIR, BucketRecord, Manifest, manifest_path, read_manifest, read_manifests
from tcdeploy.errors import IntegrityError, UsageError

# A compiled bucket may choose another token than the eager model where two are about as likely: nats between them.
LOGPROB_TOLERANCE_NATS = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}


@dataclass(frozen=True)
class VerifiedPlan:
    """One plan whose every byte is as recorded. `files_not_from_bundle` counts files that are not as they came in the bundle: that
    a start compiled, or that another plan had first."""

    plan_key: str
    model: str
    files: int
    bytes: int
    signer: TrustedKey | None
    is_from_bundle: bool
    files_not_from_bundle: int = 0


@dataclass(frozen=True)
class BucketReplay:
    """One bucket's answers here beside the packer's: how many rows, and the largest difference in nats."""

    bucket: str
    rows: int
    mismatched_tokens: int
    max_logprob_difference: float
    passed: bool
    reason: str = ""


def verify_bundle(path: Path, trusted_keys: Path, allow_unsigned: bool = False) -> VerifiedPlan:
    """Every byte of a bundle, and its signature. Raises TrustError and IntegrityError."""
    opened = open_bundle(path, trusted_keys, allow_unsigned)
    for _, chunks in read_files(path, opened.signed_header, opened.header.manifest.files):
        for _ in chunks:
            pass
    return _verified_plan(opened.header.manifest, opened.signer, is_from_bundle=True)


def verify_folder(folder: Path, trusted_keys: Path, allow_unsigned: bool = False) -> list[VerifiedPlan]:
    """Every file that a plan of the folder names. Raises TrustError, IntegrityError, UsageError where there is none."""
    manifests = read_manifests(folder)
    found = []
    for key, manifest in manifests.items():
        files, signer, files_not_from_bundle = {file.path: file for file in manifest.files}, None, 0
        record = folder / BUNDLES_DIR / f"{key}{HEADER_SUFFIX}"
        if record.exists():
            header, signer = _read_stored_header(record, trusted_keys, allow_unsigned)
            # A file of another plan that was there first has stayed (unpack.py); else what was signed counts.
            others = {file for other in manifests if other != key for file in manifests[other].files}
            signed = {file.path: file for file in header.manifest.files}
            files |= {name: file for name, file in signed.items() if files.get(name) not in others}
            others_than_signed = [name for name, file in files.items() if signed.get(name) != file]
            files_not_from_bundle = sum(not name.startswith(TOOLCHAIN_DIR) for name in others_than_signed)
        if damage := find_damage(folder, files.values()):
            more = f", and {len(damage) - 1} more are damaged" if len(damage) > 1 else ""
            raise IntegrityError(
                f"{folder / damage[0].path} {damage[0].reason}{more}",
                "--on-bad-cache rebuild discards it and compiles again; a bundle can be unpacked again",
            )
        if strangers := unlisted_files(folder, manifest):
            raise IntegrityError(
                f"{sorted(strangers)[0]} is named by no manifest, and torch would run it",
                "remove it; the next start would",
            )
        found.append(_verified_plan(manifest, signer, record.exists(), files_not_from_bundle))
    _check_stored_headers(folder)
    if not found:
        raise UsageError(f"the folder {folder} holds no plan that finished warming", "tcdeploy warm MODEL --cache-dir")
    return found


def packed_manifest(folder: Path, plan_key: str) -> Manifest:
    """The packer's own where the plan came in a bundle: the folder's is written anew by every start."""
    record = folder / BUNDLES_DIR / f"{plan_key}{HEADER_SUFFIX}"
    if record.exists():
        with open(record, "rb") as file:
            return parse_header(read_signed_header(file, str(record)), str(record)).manifest
    manifest = read_manifest(manifest_path(folder, plan_key))
    assert manifest is not None, "it was verified"
    return manifest


def _read_stored_header(path: Path, trusted_keys: Path, allow_unsigned: bool) -> tuple[Header, TrustedKey | None]:
    with open(path, "rb") as file:
        signed_header = read_signed_header(file, str(path))
        if file.read(1):
            raise IntegrityError(f"the record {path} is longer than it was", "unpack the bundle again")
    signer = verify_signature(signed_header, str(path), trusted_keys, allow_unsigned)
    header = parse_header(signed_header, str(path))
    if header.plan_key != path.stem:
        raise IntegrityError(f"the record {path} is of another plan", "unpack the bundle again")
    return header, signer


def _check_stored_headers(folder: Path) -> None:
    for path in (folder / BUNDLES_DIR).glob(f"*{HEADER_SUFFIX}"):
        if not (folder / MANIFESTS_DIR / f"{path.stem}.json").exists():
            raise IntegrityError(f"the plan {path.stem} was unpacked here, and its manifest is gone", "unpack it again")


def _verified_plan(
    manifest: Manifest, signer: TrustedKey | None, is_from_bundle: bool, files_not_from_bundle: int = 0
) -> VerifiedPlan:
    size = sum(file.bytes for file in manifest.files)
    plan = manifest.plan
    return VerifiedPlan(
        plan["key"], plan["model"], len(manifest.files), size, signer, is_from_bundle, files_not_from_bundle
    )


def compare_top_tokens(packed: Manifest, here: tuple[BucketRecord, ...]) -> list[BucketReplay]:
    """Per bucket, what the compiled model answers here beside what the eager model answered where it was packed."""
    records = {record.bucket: record for record in here}
    return [
        _compare_bucket(record, records.get(record.bucket), str(packed.plan["compute_dtype"]))
        for record in packed.buckets
    ]


def _compare_bucket(there: BucketRecord, here: BucketRecord | None, dtype: str) -> BucketReplay:
    wanted = there.eager_greedy_tokens
    rows = len(wanted.tokens)
    if here is None or here.greedy_tokens.inputs_sha256 != wanted.inputs_sha256:
        return BucketReplay(there.bucket, rows, 0, 0.0, False, "it was not asked the same here")
    found = here.greedy_tokens
    difference = max(abs(a - b) for a, b in zip(wanted.logprobs, found.logprobs, strict=True))
    other = sum(a != b for a, b in zip(wanted.tokens, found.tokens, strict=True))
    passed = difference <= LOGPROB_TOLERANCE_NATS[dtype]
    reason = (
        "" if passed else "its answers are not those of the model that was packed: other weights, or a wrong program"
    )
    return BucketReplay(there.bucket, rows, other, difference, passed, reason)
