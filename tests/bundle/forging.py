"""Forges bundles: arbitrary bytes behind arbitrary headers, with matching digests and valid signatures."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import zstandard

from tcdeploy.cache.files.records import FileRecord
from tcdeploy.cache.record.bundle_header import Header, Payload, header_bytes, make_portable
from tcdeploy.cache.record.manifest import Manifest
from tcdeploy.cache.trust.signing import sign, signed_header_bytes


def record(path: str, content: bytes) -> FileRecord:
    return FileRecord(path, len(content), hashlib.sha256(content).hexdigest())


def member(path: str, content: bytes, kind: bytes = tarfile.REGTYPE, link: str = "", **more: Any) -> bytes:
    """One tar member with padding. `more` overrides header fields, such as `size`."""
    info = tarfile.TarInfo(path)
    info.size, info.mode, info.type, info.linkname = len(content), 0o644, kind, link
    for name, value in more.items():
        setattr(info, name, value)
    return info.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogatepass") + content + bytes(-len(content) % 512)


def tar(*members: bytes) -> bytes:
    return b"".join(members) + bytes(1024)


def compressed(*pieces: bytes) -> bytes:
    """All pieces in one zstd frame."""
    out = io.BytesIO()
    with zstandard.ZstdCompressor(level=3).stream_writer(out, closefd=False) as stream:
        for piece in pieces:
            stream.write(piece)
    return out.getvalue()


def members_of(folder: Path, files: Iterable[FileRecord]) -> list[bytes]:
    return [member(file.path, (folder / file.path).read_bytes()) for file in files]


def forge(path: Path, payload: bytes, manifest: Manifest, files: Any, secret: Path | None) -> Path:
    """A bundle with this compressed payload whose header lists `files`, signed if `secret` is given."""
    forged = replace(make_portable(manifest), files=tuple(files))
    digest = Payload(len(payload), hashlib.sha256(payload).hexdigest())
    return forge_header(path, header_bytes(Header(forged, digest)), payload, secret)


def forge_header(path: Path, header: bytes, payload: bytes, secret: Path | None) -> Path:
    signatures = () if secret is None else (sign(header, secret),)
    path.write_bytes(signed_header_bytes(header, signatures) + payload)
    return path


def with_document(manifest: Manifest, payload: bytes, edit: Any) -> bytes:
    """A header whose document {"payload", "manifest"} `edit` has changed; the manifest's digest is renewed."""
    document = {
        "payload": {"bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()},
        "manifest": json.loads(json.dumps(asdict(make_portable(manifest)))),
    }
    edit(document)
    if isinstance(document.get("manifest"), dict):
        document["manifest"] = sealed(document["manifest"])
    return json.dumps(document).encode()


def sealed(manifest: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1)
