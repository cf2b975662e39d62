"""Damaged and rewritten caches and bundles: a start must use no changed file, and `verify` must reject each change.

Each attack changes a copy of a bundle, or of a cache folder with two plans from signed bundles. `restore_plan`, which
needs no torch, copies the files that a start uses into a staging folder; all of them must be from the signed bundles.
Without its signed header, a plan looks as if it had been compiled on this machine. Attacks that remove the header are
therefore tested only with `--require-signed`.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tcdeploy.bundle.pack import pack
from tcdeploy.bundle.unpack import unpack
from tcdeploy.bundle.verify import verify_bundle, verify_folder
from tcdeploy.cache.files.records import FileRecord
from tcdeploy.cache.folder.access import check_folder
from tcdeploy.cache.folder.layout import manifest_path, stored_header_path
from tcdeploy.cache.record.bundle_header import Header, header_bytes, parse_header
from tcdeploy.cache.record.manifest import Manifest, read_manifest, write_manifest
from tcdeploy.cache.record.provenance import SigningPolicy
from tcdeploy.cache.staging.folder import create_staging_folder
from tcdeploy.cache.staging.restore import restore_plan
from tcdeploy.cache.trust.signing import generate_key, read_signed_header, sign, signed_header_bytes, trust
from tcdeploy.errors import IntegrityError, TrustError
from tests.bundle.fake_caches import key_of, make_small, manifest_for, path_of

DEFAULT_COUNT = 3000
EVIL = b"cos\nsystem\n(S'true'\ntR."  # a pickle that runs the command `true`
REFUSALS = (IntegrityError, TrustError)
OTHER_BUCKET, LOCAL_BUCKET = 64, 128


@dataclass(frozen=True)
class Target:
    """`folder` holds two plans from signed bundles; `key` is the plan that is started."""

    root: Path
    folder: Path
    bundle: Path
    other_bundle: Path
    key: str
    other_key: str
    trusted: Path
    unknown_key: Path
    signed: frozenset[tuple[str, str]]  # path and sha256 of each file of both bundles


def make_target(root: Path) -> Target:
    generate_key(root / "ci")
    generate_key(root / "unknown")
    trust("ci", root / "ci.pub", root / "trusted")
    manifest = make_small(root / "first", seed=1)
    other = make_small(root / "second", seed=2, bucket=OTHER_BUCKET)
    for number, (name, made) in enumerate((("first", manifest), ("second", other))):
        pack(root / name, key_of(made), root / f"{number}.tcb", root / "ci.key", root / "trusted")
        unpack(root / f"{number}.tcb", root / "folder", root / "trusted")
    signed = frozenset((file.path, file.sha256) for file in (*manifest.files, *other.files))
    return Target(
        root, root / "folder", root / "0.tcb", root / "1.tcb", key_of(manifest), key_of(other),
        root / "trusted", root / "unknown.key", signed,
    )  # fmt: skip


# Attacks on a folder: (folder, target, source of randomness) -> None. Each call changes the folder.

Attack = Callable[[Path, Target, random.Random], None]


def any_file(folder: Path, source: random.Random) -> Path:
    return source.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"))


def manifest_of(folder: Path, key: str) -> Manifest:
    manifest = read_manifest(manifest_path(folder, key))
    assert manifest is not None
    return manifest


def record_of(path: str, content: bytes) -> FileRecord:
    return FileRecord(path, len(content), hashlib.sha256(content).hexdigest())


def put(folder: Path, path: str, content: bytes = EVIL) -> FileRecord:
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content)
    return record_of(path, content)


def edit_manifest(folder: Path, key: str, edit: Callable[[list[FileRecord]], None], **changes: Any) -> None:
    """Rewrite a manifest with edited files and other `changes`. Its checksum stays valid."""
    manifest = manifest_of(folder, key)
    files = list(manifest.files)
    edit(files)
    write_manifest(manifest_path(folder, key), replace(manifest, files=tuple(files), **changes))


def flip_bit(folder: Path, target: Target, source: random.Random) -> None:
    path = any_file(folder, source)
    content = bytearray(path.read_bytes())
    content[source.randrange(len(content))] ^= 1 << source.randrange(8)
    path.write_bytes(content)


def cut(folder: Path, target: Target, source: random.Random) -> None:
    path = any_file(folder, source)
    os.truncate(path, source.randrange(path.stat().st_size))


def append(folder: Path, target: Target, source: random.Random) -> None:
    with open(any_file(folder, source), "ab") as file:
        file.write(source.randbytes(source.randint(1, 99)))


def swap(folder: Path, target: Target, source: random.Random) -> None:
    first = second = any_file(folder, source)
    while first.read_bytes() == second.read_bytes():
        second = any_file(folder, source)
    first_content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(first_content)


def remove(folder: Path, target: Target, source: random.Random) -> None:
    """Remove a file or folder, but not a signed header, which `remove_only_header` does."""
    path = any_file(folder, source)
    while path.parent.name == "bundles":
        path = any_file(folder, source)
    if path.parent.parent != folder and source.random() < 0.3:
        shutil.rmtree(path.parent)
    else:
        path.unlink()


def add(folder: Path, target: Target, source: random.Random) -> None:
    beside = source.choice(manifest_of(folder, target.key).files).path
    put(folder, f"{os.path.dirname(beside)}/{source.choice(['entry', 'kernel.so', 'x.py', 'added'])}")


def link_file(folder: Path, target: Target, source: random.Random) -> None:
    path, outside = any_file(folder, source), folder.parent / "outside"
    outside.write_bytes(path.read_bytes() if source.random() < 0.5 else EVIL)
    path.unlink()
    path.symlink_to(outside)


def link_folder(folder: Path, target: Target, source: random.Random) -> None:
    parent = source.choice(sorted({path.parent for path in folder.rglob("*") if path.is_file()} - {folder}))
    outside = folder.parent / "outside"
    shutil.move(parent, outside)
    if source.random() < 0.5:
        source.choice(sorted(path for path in outside.rglob("*") if path.is_file())).write_bytes(EVIL)
    parent.symlink_to(outside)


def rewrite_manifest(folder: Path, target: Target, source: random.Random) -> None:
    """Change a program, and its record in the manifest."""

    def edit(files: list[FileRecord]) -> None:
        number = source.randrange(len(files))
        shutil.rmtree(folder / "conflicts", ignore_errors=True)
        files[number] = put(folder, files[number].path, source.randbytes(files[number].bytes))

    edit_manifest(folder, target.key, edit)


def drop_from_manifest(folder: Path, target: Target, source: random.Random) -> None:
    edit_manifest(folder, target.key, lambda files: files.pop(source.randrange(len(files))))


def list_twice(folder: Path, target: Target, source: random.Random) -> None:
    """Add a second record for a file's path, and store its content in conflicts/."""

    def edit(files: list[FileRecord]) -> None:
        file = source.choice(files)
        evil = record_of(file.path, EVIL)
        put(folder, f"conflicts/{evil.sha256}")
        files.insert(source.randrange(len(files) + 1), evil)

    edit_manifest(folder, target.key, edit)


def list_outside(folder: Path, target: Target, source: random.Random) -> None:
    path = source.choice(["../../evil/x", "/evil/x", "fxgraph/../../../evil/x", "a//b", "./x"])
    edit_manifest(folder, target.key, lambda files: files.append(record_of(path, EVIL)))


def second_manifest(folder: Path, target: Target, source: random.Random) -> None:
    """Change a program, and forge the manifest of another plan that lists the changed file."""
    file = source.choice(manifest_of(folder, target.key).files)
    shutil.rmtree(folder / "conflicts", ignore_errors=True)
    evil = put(folder, file.path, source.randbytes(file.bytes))
    forged = manifest_for(folder, [file.path], bucket=LOCAL_BUCKET)
    write_manifest(path_of(folder, forged), forged)
    if source.random() < 0.5:
        edit_manifest(folder, target.key, lambda files: files.__setitem__(files.index(file), evil))


def copy_manifest(folder: Path, target: Target, source: random.Random) -> None:
    """Replace the plan's manifest with that of the other plan, with or without its key."""
    manifest = manifest_of(folder, target.other_key)
    plan = {**manifest.plan, "key": source.choice([target.key, target.other_key])}
    write_manifest(manifest_path(folder, target.key), replace(manifest, plan=plan))


def forge_header(folder: Path, target: Target, source: random.Random) -> None:
    """Change a program, the manifest and the signed header. The checksums are valid; the signature is the old one."""
    rewrite_manifest(folder, target, source)
    path = stored_header_path(folder, target.key)
    with open(path, "rb") as file:
        stored = read_signed_header(file, "x")
    header = parse_header(stored, "x")
    files = manifest_of(folder, target.key).files
    forged = header_bytes(Header(replace(header.manifest, files=files), header.payload))
    path.write_bytes(signed_header_bytes(forged, stored.signatures))


def swap_headers(folder: Path, target: Target, source: random.Random) -> None:
    content = stored_header_path(folder, target.other_key).read_bytes()
    stored_header_path(folder, target.key).write_bytes(content)


# After these attacks, a plan or a file looks as if it had been compiled on this machine.


def remove_only_header(folder: Path, target: Target, source: random.Random) -> None:
    stored_header_path(folder, source.choice([target.key, target.other_key])).unlink()


def remove_header(folder: Path, target: Target, source: random.Random) -> None:
    rewrite_manifest(folder, target, source)
    stored_header_path(folder, target.key).unlink()


def sign_with_unknown_key(folder: Path, target: Target, source: random.Random) -> None:
    forge_header(folder, target, source)
    path = stored_header_path(folder, target.key)
    with open(path, "rb") as file:
        header = read_signed_header(file, "x").header
    path.write_bytes(signed_header_bytes(header, (sign(header, target.unknown_key),)))


def add_to_manifest(folder: Path, target: Target, source: random.Random) -> None:
    beside = source.choice(manifest_of(folder, target.key).files).path
    evil = put(folder, f"{os.path.dirname(beside)}/added.so")
    edit_manifest(folder, target.key, lambda files: files.append(evil))


def second_plan(folder: Path, target: Target, source: random.Random) -> None:
    """Add a forged plan with its own programs, because some starts copy the files of all plans."""
    put(folder, "fxgraph/evil/entry")
    forged = manifest_for(folder, ["fxgraph/evil/entry"], bucket=LOCAL_BUCKET)
    write_manifest(path_of(folder, forged), forged)
    edit_manifest(folder, target.key, lambda files: None, is_first_start=source.random() < 0.5)


def leave_journal(folder: Path, target: Target, source: random.Random) -> None:
    """Remove the plan, and add a staging folder as a killed start leaves it."""
    stored_header_path(folder, target.key).unlink()
    manifest_path(folder, target.key).unlink()
    evil = put(folder / ".start-evil", "fxgraph/evil/entry")
    line = {"plan": target.key, "files": [asdict(evil)]}
    (folder / ".start-evil" / "finished.jsonl").write_text(json.dumps(line) + "\n")


# PROTECTED: attacks that must fail on every start. NEED_REQUIRE_SIGNED: on a start with --require-signed.
PROTECTED: tuple[Attack, ...] = (
    flip_bit, cut, append, swap, remove, add, link_file, link_folder, rewrite_manifest, drop_from_manifest, list_twice,
    list_outside, second_manifest, copy_manifest, forge_header, swap_headers,
)  # fmt: skip
NEED_REQUIRE_SIGNED: tuple[Attack, ...] = (
    remove_only_header, remove_header, sign_with_unknown_key, add_to_manifest, second_plan, leave_journal,
)  # fmt: skip


# Attacks on a bundle: (content, target, source of randomness, kind) -> changed content


def changed_bundle(content: bytes, target: Target, source: random.Random, kind: str) -> bytes:
    position, length = source.randrange(len(content)), source.randint(1, 200)
    if kind == "bundle: bit":
        changed = bytearray(content)
        changed[position] ^= 1 << source.randrange(8)
        return bytes(changed)
    if kind == "bundle: cut":
        return content[:position]
    if kind == "bundle: tail":
        return content + source.randbytes(length)
    if kind == "bundle: removed":
        return content[:position] + content[position + length :]
    if kind == "bundle: added":
        return content[:position] + source.randbytes(length) + content[position:]
    if kind == "bundle: overwritten":
        return content[:position] + source.randbytes(length) + content[position + length :]
    return forged_bundle(content, target, source, kind)


def forged_bundle(content: bytes, target: Target, source: random.Random, kind: str) -> bytes:
    with open(target.bundle, "rb") as file, open(target.other_bundle, "rb") as other_file:
        stored, other = read_signed_header(file, "x"), read_signed_header(other_file, "x")
        payload, other_payload = file.read(), other_file.read()
    header, signatures = stored.header, stored.signatures
    if kind == "bundle: payload of another":
        payload = other_payload
    elif kind == "bundle: signature of another":
        signatures = other.signatures
    elif kind == "bundle: unsigned":
        signatures = ()
    elif kind == "bundle: unknown key":
        signatures = (sign(header, target.unknown_key),)
    else:  # "bundle: rewritten header"
        parsed = parse_header(stored, "x")
        files = list(parsed.manifest.files)
        files[source.randrange(len(files))] = record_of("fxgraph/evil/entry", EVIL)
        header = header_bytes(Header(replace(parsed.manifest, files=tuple(files)), parsed.payload))
    return signed_header_bytes(header, signatures) + payload


BUNDLE_KINDS = tuple(
    f"bundle: {kind}"
    for kind in (
        "bit", "cut", "tail", "removed", "added", "overwritten", "payload of another", "signature of another",
        "unsigned", "unknown key", "rewritten header",
    )
)  # fmt: skip


# Effects of an attack


def used_files(folder: Path, target: Target, require_signed: bool) -> set[tuple[str, str]] | None:
    """Path and sha256 of all files that a start would load; None if the start refuses the folder."""
    try:
        check_folder(folder)
        staging = create_staging_folder(str(folder))
        try:
            restore_plan(staging, target.key, False, SigningPolicy(target.trusted, require_signed))
            return {
                (path.relative_to(staging.path).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest())
                for path in Path(staging.path).rglob("*")
                if path.is_file() and path.name != "lock"
            }
        finally:
            staging.remove()
    except REFUSALS:
        return None


def is_accepted(check: Callable[[], object]) -> bool:
    try:
        check()
    except REFUSALS:
        return False
    return True


def effects_on_folder(folder: Path, target: Target, is_protected: bool) -> list[str]:
    effects = []
    for require_signed in (False, True) if is_protected else (True,):
        used = used_files(folder, target, require_signed)
        if used is not None and used - target.signed:
            effects.append(f"a start used {sorted(used - target.signed)[0][0]}")
        if is_accepted(lambda: verify_folder(folder, target.trusted, require_signed=require_signed)):  # noqa: B023
            effects.append("verify accepted it")
    return effects


def effects_of_bundle(path: Path, folder: Path, target: Target) -> list[str]:
    effects = []
    if is_accepted(lambda: verify_bundle(path, target.trusted)):
        effects.append("verify accepted it")
    if is_accepted(lambda: unpack(path, folder, target.trusted)) or folder.exists():
        effects.append("unpack wrote it")
    return effects


def attack_once(number: int, source: random.Random, target: Target) -> tuple[str, list[str]]:
    """Make one attack. `number` selects its kind. Returns the name of the kind, and the effects."""
    work = target.root / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(mode=0o700)
    kinds = (*PROTECTED, *NEED_REQUIRE_SIGNED, *BUNDLE_KINDS)
    kind = kinds[number % len(kinds)]
    if isinstance(kind, str):
        content = target.bundle.read_bytes()
        changed = changed_bundle(content, target, source, kind)
        assert changed != content
        (work / "attacked.tcb").write_bytes(changed)
        return kind, effects_of_bundle(work / "attacked.tcb", work / "folder", target)
    folder = work / "folder"
    shutil.copytree(target.folder, folder)
    kind(folder, target, source)
    return f"folder: {kind.__name__}", effects_on_folder(folder, target, kind in PROTECTED)


def run(source: random.Random, count: int) -> dict[str, Any]:
    attacks: Counter[str] = Counter()
    succeeded = []
    with tempfile.TemporaryDirectory(prefix="tcdeploy-damage-") as root:
        target = make_target(Path(root))
        intact = used_files(target.folder, target, require_signed=True)
        assert intact is not None and intact <= target.signed and len(intact) == len(target.signed) // 2
        assert len(verify_folder(target.folder, target.trusted, require_signed=True)) == 2
        for number in range(count):
            kind, effects = attack_once(number, source, target)
            attacks[kind] += 1
            succeeded += [f"{kind}, number {number}: {effect}" for effect in effects]
    return {"attacks": count, "kinds": dict(sorted(attacks.items())), "succeeded": succeeded}
