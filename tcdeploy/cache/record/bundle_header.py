"""The bundle header: the manifest of a plan, made portable, and the size and sha256 of the payload.

A bundle of a plan's jit programs may also hold the plan of the same model with packages: `header.manifests` then has
both, each with its own files. The payload holds a file that both list once.

The manifest has the same format as in a cache folder, so unpacking and warming give equal folders. Paths of the packing
machine and timings of single warm starts are removed, so that a cache packs to the same bytes in any folder. (Compiled
files still contain paths of their sources.) Does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tcdeploy.cache.files.records import FileRecord, is_cache_file, is_plain_record
from tcdeploy.cache.record.manifest import Manifest, manifest_text, parse_packed_manifest
from tcdeploy.cache.trust.signing import SignedHeader, TrustedKey, damaged_error
from tcdeploy.errors import IntegrityError
from tcdeploy.planning.bucket_record import BucketRecord
from tcdeploy.planning.environment import parse_environment

PATH_FIELDS = ("cache_dir", "inductor_cache_dir", "user_cache_dir")
CACHE_FOLDER_DECISION = "cache folder"
MAX_FILES, MAX_TOTAL_FILE_BYTES = 100_000, 8 << 30


@dataclass(frozen=True)
class Payload:
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Header:
    """`manifest`: of the plan that the bundle is named after. `others`: of its other plans."""

    manifest: Manifest
    payload: Payload
    others: tuple[Manifest, ...] = ()

    @property
    def plan_key(self) -> str:
        return str(self.manifest.plan["key"])

    @property
    def manifests(self) -> dict[str, Manifest]:
        """By plan key."""
        return {str(manifest.plan["key"]): manifest for manifest in (self.manifest, *self.others)}

    @property
    def built_without_device(self) -> bool:
        """Whether a plan of the bundle was compiled on a machine without its GPU."""
        return any(manifest.blind for manifest in self.manifests.values())

    @property
    def has_run(self) -> bool:
        """Whether each plan of the bundle has been started before it was packed."""
        return all(manifest.has_run for manifest in self.manifests.values())

    @property
    def payload_files(self) -> tuple[FileRecord, ...]:
        """In the order of the payload. Two plans may have different files with the same path."""
        if not self.others:
            return self.manifest.files
        files = {file for manifest in self.manifests.values() for file in manifest.files}
        return tuple(sorted(files, key=lambda file: (file.path, file.sha256)))

    def of_plan(self, plan_key: str) -> Header:
        """The same bundle, with this plan as its `manifest`. Raises KeyError."""
        manifests = self.manifests
        manifest = manifests.pop(plan_key)
        return Header(manifest, self.payload, tuple(manifests.values()))


@dataclass(frozen=True)
class CheckedHeader:
    """A header whose signatures were checked before it was parsed: of a bundle, or as a cache folder stores it."""

    header: Header
    signed_header: SignedHeader
    signer: TrustedKey | None  # None: no trusted key signed it

    @property
    def files(self) -> tuple[FileRecord, ...]:
        return self.header.manifest.files

    @property
    def lacks_measurements(self) -> bool:
        """Whether the plan was packed before its first start: without a reference, a start record and timings."""
        return not self.header.manifest.has_run


def make_portable(manifest: Manifest) -> Manifest:
    """The manifest without paths of this machine and timings of this run."""
    decisions = [decision for decision in manifest.plan["decisions"] if decision["name"] != CACHE_FOLDER_DECISION]
    plan = {**_blank_paths(manifest.plan), "decisions": decisions}
    origin = dataclasses.replace(manifest.origin, recipe=_blank_paths(manifest.origin.recipe))
    return dataclasses.replace(
        manifest,
        plan=plan,
        origin=origin,
        environment=_blank_paths(manifest.environment),
        stage_seconds={},
        buckets=tuple(map(_without_run_timings, manifest.buckets)),
        workspace_bytes=None,
    )


def _without_run_timings(record: BucketRecord) -> BucketRecord:
    """Clears what differs between two warm starts; `cold_seconds` stays."""
    return dataclasses.replace(
        record, compile_seconds=0.0, capture_seconds=0.0, check_seconds=0.0, peak_memory_bytes=0,
        graph_memory_bytes=None, eager_ms=None, compiled_ms=None, eager_spread_ms=None, compiled_spread_ms=None,
    )  # fmt: skip


def _blank_paths(document: dict[str, Any]) -> dict[str, Any]:
    return {key: "" if key in PATH_FIELDS else value for key, value in document.items()}


def header_bytes(header: Header) -> bytes:
    document: dict[str, Any] = {"payload": asdict(header.payload), "manifest": manifest_text(header.manifest)}
    if header.built_without_device:
        document |= {"built_without_device": True, "has_run": header.has_run}
    if header.others:
        document["other_manifests"] = [manifest_text(manifest) for manifest in header.others]
    return json.dumps(document).encode()


def parse_header(signed_header: SignedHeader, name: str) -> Header:
    """Parse a header with a verified signature. Raises IntegrityError, and MismatchError for another version's."""
    try:
        document = json.loads(signed_header.header)
        payload = Payload(int(document["payload"]["bytes"]), str(document["payload"]["sha256"]))
        texts = [document["manifest"], *document.get("other_manifests", ())]
        manifest, *others = (parse_packed_manifest(text, Path(name)) for text in texts)
        header = Header(manifest, payload, tuple(others))
        for manifest in header.manifests.values():
            parse_environment(manifest.environment).cache_factors()  # which starts compare
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise IntegrityError(f"the bundle {name} has an invalid header: {error}", "fetch it again") from error
    for key, manifest in header.manifests.items():
        if len(key) != 16 or not set(key) <= set("0123456789abcdef"):
            raise IntegrityError(f"the bundle {name} has an invalid plan key: {key!r:.50}", "fetch it again")
        check_files(manifest.files, name)
    if len(header.manifests) != len(texts):
        raise damaged_error(name, "it lists a plan twice")
    return header


def rollback_reason(new: Header, existing: Header) -> str:
    """Why the new bundle is older than one of the same plan; empty if it is not. One without a date is the oldest.

    Of two bundles of one build without the GPU, the one that was packed before the first start is older.
    """
    date, existing_date = new.manifest.compiled_at, existing.manifest.compiled_at
    if date == existing_date and existing.manifest.has_run and not new.manifest.has_run:
        return "it was packed before the first start on the GPU, and the newer one after it"
    if existing_date is None or (date is not None and date >= existing_date):
        return ""
    return f"it was compiled {_format_date(date)}, and the newer one {_format_date(existing_date)}"


def _format_date(seconds: int | None) -> str:
    if seconds is None:
        return "at an unknown time"
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    return f"{seconds} s after 1970"


def check_files(files: tuple[FileRecord, ...], name: str) -> None:
    """Check that the paths are plain, relative and unique, and the sizes within limits. Raises IntegrityError."""
    if len(files) > MAX_FILES:
        raise damaged_error(name, f"it lists {len(files)} files; the limit is {MAX_FILES}")
    seen: set[str] = set()
    for file in files:
        if not _is_safe_file(file) or file.path in seen:
            raise damaged_error(name, f"it lists an invalid or duplicate file: {file.path!r:.200}")
        seen.add(file.path)
    folders = {str(parent) for path in seen for parent in PurePosixPath(path).parents}
    if folders & seen:
        raise damaged_error(name, "it lists the same path as a file and as a folder")
    total_bytes = sum(file.bytes for file in files)
    if total_bytes > MAX_TOTAL_FILE_BYTES:
        raise damaged_error(name, f"its files have {total_bytes} bytes; the limit is {MAX_TOTAL_FILE_BYTES}")


def _is_safe_file(file: FileRecord) -> bool:
    return is_plain_record(file) and file.bytes > 0 and not file.path.startswith(".") and is_cache_file(file.path)
