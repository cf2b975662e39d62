"""The bundle header: the manifest of one plan, made portable, and the size and sha256 of the payload.

The manifest is the one of the cache folder, so a folder that a bundle was unpacked into equals one that was warmed.
Paths of the packing machine and timings of single warm starts are removed, so a cache in any folder packs to the same
bytes. (Compiled files still contain paths of their sources.) Does not import torch.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tcdeploy.bundle.container import Payload, SignedHeader, check_files
from tcdeploy.cache.manifest import BucketRecord, Manifest, manifest_text, parse_manifest
from tcdeploy.errors import IntegrityError
from tcdeploy.planning.environment import parse_environment

PATH_FIELDS = ("cache_dir", "inductor_cache_dir", "user_cache_dir")
CACHE_FOLDER_DECISION = "cache folder"
REQUIRED_PLAN_FIELDS = ("key", "model", "compute_dtype", "mode")


@dataclass(frozen=True)
class Header:
    manifest: Manifest
    payload: Payload

    @property
    def plan_key(self) -> str:
        return str(self.manifest.plan["key"])


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
        record,
        compile_seconds=0.0,
        capture_seconds=0.0,
        check_seconds=0.0,
        peak_memory_bytes=0,
        graph_memory_bytes=None,
        eager_ms=None,
        compiled_ms=None,
    )


def _blank_paths(document: dict[str, Any]) -> dict[str, Any]:
    return {key: "" if key in PATH_FIELDS else value for key, value in document.items()}


def _check_required_fields(manifest: Manifest) -> None:
    """Check the fields that compatibility depends on. Raises KeyError, TypeError or AttributeError."""
    if not all(isinstance(manifest.plan[name], str) for name in REQUIRED_PLAN_FIELDS):
        raise TypeError("a field of its plan is not a string")
    parse_environment(manifest.environment).cache_factors()


def header_bytes(header: Header) -> bytes:
    return json.dumps({"payload": asdict(header.payload), "manifest": manifest_text(header.manifest)}).encode()


def parse_header(signed_header: SignedHeader, name: str) -> Header:
    """Parse a header whose signature has been verified. Raises IntegrityError for an invalid one."""
    try:
        document = json.loads(signed_header.header)
        payload = Payload(int(document["payload"]["bytes"]), str(document["payload"]["sha256"]))
        header = Header(parse_manifest(document["manifest"], Path(name)), payload)
        key = header.plan_key
        _check_required_fields(header.manifest)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise IntegrityError(f"the bundle {name} has an invalid header: {error}", "fetch it again") from error
    if len(key) != 16 or not set(key) <= set("0123456789abcdef"):
        raise IntegrityError(f"the bundle {name} has an invalid plan key: {key!r:.50}", "fetch it again")
    check_files(header.manifest.files, name)
    return header
