"""A plan that came in a bundle is checked against the signed header, whatever manifests say. No torch."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tcdeploy.bundle.pack import pack
from tcdeploy.bundle.unpack import unpack
from tcdeploy.cache.files.records import FileRecord, hash_files
from tcdeploy.cache.folder.layout import manifest_path, stored_header_path
from tcdeploy.cache.record import provenance
from tcdeploy.cache.record.bundle_header import Header, header_bytes, parse_header
from tcdeploy.cache.record.manifest import Manifest, read_manifest, write_manifest
from tcdeploy.cache.record.provenance import SigningPolicy, has_bundle_changed, read_stored_bundle
from tcdeploy.cache.record.unlisted import discard_if_damaged
from tcdeploy.cache.staging.folder import create_staging_folder
from tcdeploy.cache.staging.restore import restore_plan
from tcdeploy.cache.trust.signing import read_signed_header, signed_header_bytes
from tcdeploy.errors import IntegrityError, TrustError
from tests.bundle.conftest import Keys, Packed
from tests.bundle.fake_caches import KINDS, key_of, make_small, manifest_for, path_of

EVIL = b"cos\nsystem\n"
COLD_KEY = "f" * 16


@pytest.fixture
def unpacked(small: Packed, keys: Keys, tmp_path: Path) -> Path:
    unpack(small.bundle, tmp_path / "unpacked", keys.trusted)
    return tmp_path / "unpacked"


class Started:
    """What a start gets: its manifest, the bundle, and the contents of its staging folder by path."""

    def __init__(
        self, folder: Path, plan_key: str, trusted: Path, rebuild: bool = False, require_signed: bool = False
    ) -> None:
        staging = create_staging_folder(str(folder))
        try:
            self.manifest = restore_plan(staging, plan_key, rebuild, SigningPolicy(trusted, require_signed))
            self.bundle = staging.bundle
            root = Path(staging.path)
            paths = [path for path in root.rglob("*") if path.is_file() and path.name != "lock"]
            self.files = {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}
        finally:
            staging.remove()


def rewrite(folder: Path, manifest: Manifest, edit: Callable[[dict[str, FileRecord]], None]) -> None:
    """Change the list of files of a manifest on disk; its checksum is valid."""
    stored = read_manifest(path_of(folder, manifest))
    assert stored is not None
    files = {file.path: file for file in stored.files}
    edit(files)
    write_manifest(path_of(folder, manifest), replace(stored, files=tuple(files.values())))


def change_program(folder: Path, manifest: Manifest, name: str = KINDS[1]) -> None:
    """Change a program, and the manifest with it."""
    (folder / name).write_bytes(EVIL)
    [evil] = hash_files(folder, [name])
    rewrite(folder, manifest, lambda files: files.update({name: evil}))


def test_a_start_from_a_bundle_gets_its_files_and_its_signer(unpacked: Path, small: Packed, keys: Keys) -> None:
    started = Started(unpacked, small.key, keys.trusted, require_signed=True)
    assert started.files == {name: (small.folder / name).read_bytes() for name in KINDS}
    assert started.bundle is not None and started.bundle.signer is not None and started.bundle.signer.name == "ci"


def test_a_changed_program_with_a_rewritten_manifest_is_refused(unpacked: Path, small: Packed, keys: Keys) -> None:
    change_program(unpacked, small.manifest)
    with pytest.raises(IntegrityError, match=f"does not list {KINDS[1]} with the size and sha256 of its") as caught:
        Started(unpacked, small.key, keys.trusted)
    assert "tcdeploy cache unpack" in caught.value.hint


def test_a_manifest_without_a_signed_file_is_refused(unpacked: Path, small: Packed, keys: Keys) -> None:
    rewrite(unpacked, small.manifest, lambda files: files.pop(KINDS[3]) and None)
    with pytest.raises(IntegrityError, match=f"does not list {KINDS[3]} with the size and sha256 of its"):
        Started(unpacked, small.key, keys.trusted)


def test_a_plan_that_must_be_compiled_takes_no_changed_program_of_a_bundle(
    unpacked: Path, small: Packed, keys: Keys
) -> None:
    """A cold start gets the files of all plans."""
    assert Started(unpacked, COLD_KEY, keys.trusted).files.keys() == set(KINDS)
    change_program(unpacked, small.manifest)
    assert Started(unpacked, COLD_KEY, keys.trusted).files == {}


@pytest.mark.parametrize("path", ["../outside", "/etc/outside", "fxgraph/../../outside", "fxgraph//x"])
def test_a_manifest_that_lists_a_path_outside_of_the_folder_is_refused(
    small: Packed, keys: Keys, path: str, tmp_path: Path
) -> None:
    shutil.copytree(small.folder, tmp_path / "cache")
    (tmp_path / "outside").write_bytes(EVIL)
    [outside] = hash_files(tmp_path, ["outside"])
    rewrite(tmp_path / "cache", small.manifest, lambda files: files.update({path: replace(outside, path=path)}))
    with pytest.raises(IntegrityError, match="lists an invalid or duplicate file"):
        Started(tmp_path / "cache", small.key, keys.trusted)


def test_a_manifest_that_lists_a_path_twice_is_refused(unpacked: Path, small: Packed, keys: Keys) -> None:
    evil = FileRecord(KINDS[1], len(EVIL), "0" * 64)
    rewrite(unpacked, small.manifest, lambda files: files.update({"second": evil}))
    with pytest.raises(IntegrityError, match="lists an invalid or duplicate file"):
        Started(unpacked, small.key, keys.trusted)


def test_a_manifest_of_another_plan_is_refused(unpacked: Path, small: Packed, keys: Keys) -> None:
    other = manifest_for(unpacked, [KINDS[0]], bucket=64)
    write_manifest(path_of(unpacked, small.manifest), other)
    with pytest.raises(IntegrityError, match="it belongs to plan"):
        Started(unpacked, small.key, keys.trusted)


def test_a_plan_from_a_bundle_takes_no_files_of_other_plans(unpacked: Path, small: Packed, keys: Keys) -> None:
    """Even if its manifest says that its process found programs in memory, which adds the files of all plans."""
    (unpacked / "fxgraph/evil").write_bytes(EVIL)
    made_up = manifest_for(unpacked, ["fxgraph/evil"], bucket=64)
    write_manifest(path_of(unpacked, made_up), made_up)
    local = read_manifest(path_of(unpacked, small.manifest))
    assert local is not None
    write_manifest(path_of(unpacked, small.manifest), replace(local, is_first_start=False))
    assert Started(unpacked, small.key, keys.trusted).files.keys() == set(KINDS)


def test_an_unpacked_plan_without_a_manifest_is_refused_and_can_be_rebuilt(
    unpacked: Path, small: Packed, keys: Keys
) -> None:
    path_of(unpacked, small.manifest).unlink()
    with pytest.raises(IntegrityError, match="its manifest is missing"):
        Started(unpacked, small.key, keys.trusted)
    assert Started(unpacked, small.key, keys.trusted, rebuild=True).manifest is None
    assert not stored_header_path(unpacked, small.key).exists()


def test_a_header_of_a_manifest_with_another_schema_is_removed(unpacked: Path, small: Packed, keys: Keys) -> None:
    """After an upgrade the plan is compiled again, and would then differ from the header."""
    path_of(unpacked, small.manifest).write_text('{"schema": 3, "plan": {}}')
    assert Started(unpacked, small.key, keys.trusted).manifest is None
    assert not stored_header_path(unpacked, small.key).exists()


def forge_header(folder: Path, plan_key: str) -> None:
    """Another model name in the header, under the old signature and a valid checksum."""
    path = stored_header_path(folder, plan_key)
    with open(path, "rb") as file:
        stored = read_signed_header(file, "x")
    header = parse_header(stored, "x")
    plan = {**header.manifest.plan, "model": "someone/other"}
    forged = header_bytes(Header(replace(header.manifest, plan=plan), header.payload))
    path.write_bytes(signed_header_bytes(forged, stored.signatures))


@pytest.mark.parametrize("rebuild", [False, True])
def test_an_invalid_signature_of_a_trusted_key_is_a_trust_error(
    unpacked: Path, small: Packed, keys: Keys, rebuild: bool
) -> None:
    forge_header(unpacked, small.key)
    with pytest.raises(TrustError, match="the signature of ci does not match") as caught:
        Started(unpacked, small.key, keys.trusted, rebuild)
    assert caught.value.exit_code == 4


def test_without_cryptography_a_start_checks_the_files_but_not_the_signature(
    unpacked: Path, small: Packed, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance.importlib.util, "find_spec", lambda name: None)
    started = Started(unpacked, small.key, keys.trusted)
    assert started.bundle is not None and started.bundle.signer is None
    with pytest.raises(TrustError, match="is not from a bundle that a trusted key signed"):
        Started(unpacked, small.key, keys.trusted, require_signed=True)
    change_program(unpacked, small.manifest)
    with pytest.raises(IntegrityError, match="with the size and sha256 of its bundle"):
        Started(unpacked, small.key, keys.trusted)


def test_a_header_that_is_a_symbolic_link_is_refused(unpacked: Path, small: Packed, keys: Keys, tmp_path: Path) -> None:
    for path in (stored_header_path(unpacked, small.key), manifest_path(unpacked, small.key)):
        shutil.move(path, tmp_path / path.name)
        path.symlink_to(tmp_path / path.name)
        with pytest.raises(TrustError, match=f"{path} is a symbolic link"):
            Started(unpacked, small.key, keys.trusted)
        path.unlink()
        shutil.move(tmp_path / path.name, path)


# Files made here, and --require-signed


def compile_here(folder: Path, manifest: Manifest) -> None:
    (folder / "6n/more.so").write_bytes(b"compiled here")
    [more] = hash_files(folder, ["6n/more.so"])
    rewrite(folder, manifest, lambda files: files.update({"6n/more.so": more}))


def test_files_made_here_are_used_and_reported(
    unpacked: Path, small: Packed, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        Started(unpacked, small.key, keys.trusted)
        assert caplog.messages == []
        compile_here(unpacked, small.manifest)
        assert "6n/more.so" in Started(unpacked, small.key, keys.trusted).files
    assert caplog.messages == [
        f"1 of the {len(KINDS) + 1} files of plan {small.key} were compiled on this machine and are not in its bundle, "
        "for example 6n/more.so"
    ]


def test_require_signed_refuses_files_made_here(unpacked: Path, small: Packed, keys: Keys) -> None:
    compile_here(unpacked, small.manifest)
    with pytest.raises(TrustError, match="1 files of plan .* were compiled on this machine, .* 6n/more.so") as caught:
        Started(unpacked, small.key, keys.trusted, require_signed=True)
    assert caught.value.exit_code == 4 and "unpack the bundle again" in caught.value.hint
    unpack(small.bundle, unpacked, keys.trusted)
    assert not (unpacked / "6n/more.so").exists()
    assert Started(unpacked, small.key, keys.trusted, require_signed=True).files.keys() == set(KINDS)


@pytest.mark.parametrize("case", ["made here", "no header", "unsigned", "key not trusted", "cold"])
def test_require_signed_refuses_a_plan_without_a_trusted_signature(
    unpacked: Path, small: Packed, keys: Keys, case: str, tmp_path: Path
) -> None:
    folder, key, trusted = unpacked, small.key, keys.trusted
    if case == "made here":
        folder = small.folder
    elif case == "no header":
        stored_header_path(unpacked, small.key).unlink()
    elif case == "unsigned":
        pack(small.folder, small.key, tmp_path / "unsigned.tcb")
        unpack(tmp_path / "unsigned.tcb", tmp_path / "folder", keys.trusted, allow_unsigned=True)
        folder = tmp_path / "folder"
    elif case == "key not trusted":
        trusted = tmp_path / "no keys"
    else:
        key = COLD_KEY
    before = sorted(folder.rglob("*"))
    for rebuild in (False, True):
        with pytest.raises(TrustError, match=f"plan {key} in {folder} is not from a bundle that a trusted key signed"):
            Started(folder, key, trusted, rebuild, require_signed=True)
    assert set(before) - set(folder.rglob("*")) == set(), "nothing was discarded"
    Started(folder, key, trusted)


def test_require_signed_discards_nothing_that_is_damaged(unpacked: Path, small: Packed, keys: Keys) -> None:
    (unpacked / KINDS[2]).write_bytes(b"damaged")
    with pytest.raises(IntegrityError, match="the cache is damaged"):
        Started(unpacked, small.key, keys.trusted, rebuild=True, require_signed=True)
    assert stored_header_path(unpacked, small.key).exists()


# Changes in the meantime, and repair


def test_a_plan_that_another_process_unpacked_or_discarded_is_noticed(
    unpacked: Path, small: Packed, keys: Keys
) -> None:
    bundle = read_stored_bundle(unpacked, small.key, keys.trusted)
    assert bundle is not None
    assert not has_bundle_changed(str(unpacked), small.key, bundle)
    assert has_bundle_changed(str(unpacked), small.key, None)
    stored_header_path(unpacked, small.key).unlink()
    assert has_bundle_changed(str(unpacked), small.key, bundle)
    assert not has_bundle_changed(str(unpacked), small.key, None)


def test_a_plan_that_differs_from_its_bundle_is_discarded_before_it_is_fetched_again(
    unpacked: Path, small: Packed, keys: Keys
) -> None:
    assert not discard_if_damaged(str(unpacked), small.key, keys.trusted)
    change_program(unpacked, small.manifest)
    assert discard_if_damaged(str(unpacked), small.key, keys.trusted)
    assert not path_of(unpacked, small.manifest).exists()


def test_discarding_keeps_an_undamaged_file_whose_path_has_a_damaged_conflict(
    unpacked: Path, small: Packed, keys: Keys, tmp_path: Path
) -> None:
    """Two plans list other bytes under each path; those of the second lie in conflicts/."""
    make_small(tmp_path / "other", seed=4, bucket=64)
    [key] = [path.stem for path in (tmp_path / "other/manifests").iterdir()]
    pack(tmp_path / "other", key, tmp_path / "other.tcb", keys.secret)
    unpack(tmp_path / "other.tcb", unpacked, keys.trusted)
    conflicts = list((unpacked / "conflicts").iterdir())
    assert conflicts
    for path in conflicts:
        path.write_bytes(b"damaged")
    Started(unpacked, COLD_KEY, keys.trusted, rebuild=True)
    assert Started(unpacked, small.key, keys.trusted).files.keys() == set(KINDS)
    assert key_of(small.manifest) == small.key
