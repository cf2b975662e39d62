"""What a bundle says of itself: the manifest of one plan, made portable, and the digest of its payload.

The manifest is the one that stands in the cache folder, so a folder that a bundle is unpacked into knows the plan as if
it had been warmed there. Where it was packed is left out, and what one warm start took: so the same cache packs to the
same bytes wherever it lies. (Compiled files hold the paths of their sources all the same.) No torch here.
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
    """The manifest without the places of the machine that wrote it."""
    decisions = [one for one in manifest.plan["decisions"] if one["name"] != CACHE_FOLDER_DECISION]
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
    """What one warm start took and the next takes otherwise; what the cold one took stays."""
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
    """Of plan and machine, what a bundle is judged by. Raises KeyError, TypeError or AttributeError."""
    if not all(isinstance(manifest.plan[name], str) for name in REQUIRED_PLAN_FIELDS):
        raise TypeError("its plan is none")
    parse_environment(manifest.environment).cache_factors()


def header_bytes(header: Header) -> bytes:
    return json.dumps({"payload": asdict(header.payload), "manifest": manifest_text(header.manifest)}).encode()


def parse_header(signed_header: SignedHeader, name: str) -> Header:
    """Of a head whose signature was judged. Raises IntegrityError for what is no header of ours."""
    try:
        document = json.loads(signed_header.header)
        payload = Payload(int(document["payload"]["bytes"]), str(document["payload"]["sha256"]))
        header = Header(parse_manifest(document["manifest"], Path(name)), payload)
        key = header.plan_key
        _check_required_fields(header.manifest)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise IntegrityError(
            f"the bundle {name} has a header that cannot be read: {error}", "fetch it again"
        ) from error
    if len(key) != 16 or not set(key) <= set("0123456789abcdef"):
        raise IntegrityError(f"the bundle {name} names no plan", "fetch it again")
    check_files(header.manifest.files, name)
    return header
