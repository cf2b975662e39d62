"""Every changed bit of a bundle or an unpacked folder is detected: hundreds of seeded flips of each."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tcdeploy.bundle.pack import add_signature, pack
from tcdeploy.bundle.unpack import unpack
from tcdeploy.bundle.verify import verify_bundle, verify_folder
from tcdeploy.cache.files.records import hash_files
from tcdeploy.cache.folder import leases
from tcdeploy.cache.folder.layout import HEADERS_DIR, UNPACKING_PREFIX
from tcdeploy.cache.inventory import list_plans
from tcdeploy.cache.record.manifest import write_manifest
from tcdeploy.cache.record.unlisted import discard_if_damaged
from tcdeploy.cache.staging.folder import create_staging_folder
from tcdeploy.cache.staging.restore import restore_plan
from tcdeploy.cache.trust.signing import generate_key, read_signed_header, trust
from tcdeploy.cli import cache_bundle
from tcdeploy.errors import IntegrityError, MismatchError, TcdeployError, ThresholdError, TrustError, UsageError
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start import prepare
from tests.bundle.conftest import Keys, Packed
from tests.bundle.fake_caches import (
    KINDS,
    Child,
    as_installed,
    fill,
    flipped,
    flipped_on_disk,
    key_of,
    make_small,
    manifest_for,
    path_of,
)
from tests.conftest import mounted_tmpfs
from tests.machines import H100

FLIPS_PER_REGION = 200


def outcome_of(check: Callable[[], Any], expected: tuple[type[TcdeployError], ...], name: str) -> str:
    """The type name of the error that `check` raises. Its message must contain `name`."""
    with pytest.raises(expected) as caught:
        check()
    assert name in caught.value.message and caught.value.exit_code in (4, 5)
    return type(caught.value).__name__


def regions(bundle: Path) -> tuple[int, int, int]:
    """The end offsets of the header frame, the signature frame and the file."""
    content = bundle.read_bytes()
    with open(bundle, "rb") as file:
        payload = read_signed_header(file, str(bundle)).payload_offset
    return content.index(b"Q*M\x18"), payload, len(content)


def test_a_packed_bundle_verifies_and_names_its_signer(packed: Packed, keys: Keys) -> None:
    (verified,) = verify_bundle(packed.bundle, keys.trusted)
    assert (verified.plan_key, verified.model, verified.files) == (
        packed.key,
        "someone/model",
        len(packed.manifest.files),
    )
    assert verified.bytes == sum(file.bytes for file in packed.manifest.files)
    assert verified.signer is not None and verified.signer.name == "ci" and verified.is_from_bundle


def test_flipped_bits_of_a_bundle_are_detected(small: Packed, keys: Keys, tmp_path: Path) -> None:
    """In all three regions: header, signatures, payload."""
    target, source = shutil.copy(small.bundle, tmp_path / "x.tcb"), random.Random(1)
    bounds, error_types = (0, *regions(small.bundle)), Counter()  # type: ignore[var-annotated]
    for start, end in pairwise(bounds):
        for _ in range(FLIPS_PER_REGION):
            check = lambda: verify_bundle(target, keys.trusted)  # noqa: E731
            with flipped_on_disk(target, source.randrange(start * 8, end * 8)):
                error_types[outcome_of(check, (TrustError, IntegrityError), str(target))] += 1
    assert verify_bundle(target, keys.trusted)[0].files == len(KINDS)
    assert error_types == {"IntegrityError": 3 * FLIPS_PER_REGION}, (
        "a random change never looks like a signature of another key"
    )


@pytest.mark.parametrize("region", range(3), ids=["header", "signatures", "payload"])
@pytest.mark.parametrize("signers", [0, 1, 2], ids=["unsigned", "unknown key", "trusted and unknown key"])
def test_flipped_bits_of_a_bundle_without_a_trusted_signer_are_detected(
    small: Packed, keys: Keys, signers: int, region: int, tmp_path: Path
) -> None:
    """--allow-unsigned skips the check of the signer, not of integrity."""
    target, source = tmp_path / "x.tcb", random.Random(2)
    pack(small.folder, small.key, target, keys.secret if signers == 2 else None)
    if signers:
        generate_key(tmp_path / "unknown")
        add_signature(target, tmp_path / "unknown.key")
    bounds = (0, *regions(target))
    assert verify_bundle(target, keys.trusted, allow_unsigned=True)[0].files == len(KINDS)
    for _ in range(60):
        bit = source.randrange(bounds[region] * 8, bounds[region + 1] * 8)
        check = lambda: verify_bundle(target, keys.trusted, allow_unsigned=True)  # noqa: E731
        with flipped_on_disk(target, bit):
            outcome_of(check, (IntegrityError,), str(target))


def bits_of(size: int, count: int, source: random.Random) -> list[int]:
    """The first and the last bit of a file of `size` bytes, and `count - 2` random bits."""
    return [0, 8 * size - 1, *(source.randrange(8 * size) for _ in range(count - 2))]


@pytest.mark.parametrize("is_signed", [True, False])
def test_flipped_bits_of_an_unpacked_folder_are_detected_with_their_file(
    small: Packed, keys: Keys, is_signed: bool, tmp_path: Path
) -> None:
    """Three bits of each file, and 60 of the manifest and of the stored header, which are also parsed."""
    folder, bundle = tmp_path / "folder", tmp_path / "x.tcb"
    pack(small.folder, small.key, bundle, keys.secret if is_signed else None)
    unpack(bundle, folder, keys.trusted, allow_unsigned=not is_signed)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    assert len(files) == len(KINDS) + 2, "the files, the manifest and the stored header"
    source, parsed = random.Random(3), {path for path in files if path.parent.name in ("manifests", "bundles")}
    assert len(parsed) == 2
    for path in files:
        for bit in bits_of(path.stat().st_size, 60 if path in parsed else 3, source):
            check = lambda: verify_folder(folder, keys.trusted, allow_unsigned=not is_signed)  # noqa: E731
            with flipped_on_disk(path, bit):
                outcome_of(check, (IntegrityError,), str(path))
    [verified] = verify_folder(folder, keys.trusted, allow_unsigned=not is_signed)
    assert verified.is_from_bundle and (verified.signer is not None) == is_signed


def test_a_locally_warmed_folder_verifies_without_a_key(small: Packed, tmp_path: Path) -> None:
    [verified] = verify_folder(small.folder, tmp_path / "no keys")
    assert (verified.plan_key, verified.signer, verified.is_from_bundle) == (small.key, None, False)
    with pytest.raises(TrustError, match="is not from a bundle that a trusted key signed"):
        verify_folder(small.folder, tmp_path / "no keys", require_signed=True)


@pytest.fixture
def unpacked(small: Packed, keys: Keys, tmp_path: Path) -> Path:
    unpack(small.bundle, tmp_path / "unpacked", keys.trusted)
    return tmp_path / "unpacked"


def test_a_missing_file_is_named(unpacked: Path, keys: Keys) -> None:
    (unpacked / KINDS[2]).unlink()
    (unpacked / KINDS[5]).unlink()
    with pytest.raises(IntegrityError, match=r"is missing \(2 files are damaged\)"):
        verify_folder(unpacked, keys.trusted)


def test_files_must_match_the_signed_header_not_a_rewritten_manifest(unpacked: Path, keys: Keys) -> None:
    """A program and the manifest are replaced consistently: the stored header still lists the signed bytes."""
    before = (unpacked / KINDS[2]).read_bytes()
    manifest = make_small(unpacked, seed=5)
    assert (unpacked / KINDS[2]).read_bytes() != before
    with pytest.raises(IntegrityError, match="does not match its recorded sha256"):
        verify_folder(unpacked, keys.trusted)
    (unpacked / "bundles" / f"{key_of(manifest)}.head").unlink()
    assert len(verify_folder(unpacked, keys.trusted)) == 1, "without the stored header it counts as a local cache"


def test_an_unpacked_plan_without_its_manifest_is_an_integrity_error(unpacked: Path, keys: Keys) -> None:
    (manifest,) = (unpacked / "manifests").iterdir()
    manifest.unlink()
    with pytest.raises(IntegrityError, match=f"plan {manifest.stem} was unpacked here, but its manifest is missing"):
        verify_folder(unpacked, keys.trusted)


def test_a_manifest_or_stored_header_of_another_plan_is_refused(unpacked: Path, small: Packed, keys: Keys) -> None:
    stored_header = unpacked / "bundles" / f"{small.key}.head"
    other = make_small(unpacked, bucket=64)
    shutil.copy(path_of(unpacked, other), unpacked / "manifests" / "0123456789abcdef.json")
    with pytest.raises(IntegrityError, match=r"0123456789abcdef\.json is corrupt: it belongs to plan"):
        verify_folder(unpacked, keys.trusted)
    (unpacked / "manifests" / "0123456789abcdef.json").unlink()
    shutil.copy(stored_header, stored_header.with_name(f"{key_of(other)}.head"))
    with pytest.raises(IntegrityError, match=f"{key_of(other)}.head belongs to plan {small.key}"):
        verify_folder(unpacked, keys.trusted)


def test_a_stored_header_with_trailing_bytes_is_refused(unpacked: Path, small: Packed, keys: Keys) -> None:
    stored_header = unpacked / "bundles" / f"{small.key}.head"
    stored_header.write_bytes(stored_header.read_bytes() + b"x")
    with pytest.raises(IntegrityError, match=f"the stored header {stored_header} has trailing bytes"):
        verify_folder(unpacked, keys.trusted)


def test_a_stored_header_whose_key_is_no_longer_trusted_is_a_trust_error(
    unpacked: Path, keys: Keys, tmp_path: Path
) -> None:
    with pytest.raises(TrustError, match="no trusted key signed the bundle"):
        verify_folder(unpacked, tmp_path / "no keys")
    [verified] = verify_folder(unpacked, tmp_path / "no keys", allow_unsigned=True)
    assert verified.signer is None
    trust("again", keys.public, tmp_path / "no keys")
    [verified] = verify_folder(unpacked, tmp_path / "no keys")
    assert verified.signer is not None and verified.signer.name == "again"


@pytest.fixture
def copied_paths(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files in the temporary copy of the folder that `cache verify --run` starts from."""
    paths: list[str] = []

    def replay(copy: Path, *_: object) -> list[Any]:
        paths.extend(path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file())
        return []

    monkeypatch.setattr(cache_bundle, "_replay", replay)
    return paths


def test_a_replay_copies_no_staging_folders_and_no_precompiled_headers(
    unpacked: Path, keys: Keys, copied_paths: list[str]
) -> None:
    """Other processes remove staging folders meanwhile: a dangling link fails like a file that has been removed."""
    plan_files = [path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()]
    start = create_staging_folder(str(unpacked))
    Path(start.path, "removed").symlink_to("missing")
    for name in (f"{UNPACKING_PREFIX}ab/6n/x.so", f"{HEADERS_DIR}/a.h.gch", "6n/.12.34.tmp"):
        (unpacked / name).parent.mkdir(parents=True, exist_ok=True)
        (unpacked / name).write_bytes(b"x")
    cache_bundle.verify(unpacked, run=True, trusted_keys=keys.trusted)
    assert sorted(copied_paths) == sorted(set(plan_files) - {".lock"})


def test_a_file_that_cannot_be_copied_for_a_replay_is_named(
    unpacked: Path, keys: Keys, copied_paths: list[str]
) -> None:
    (unpacked / "removed").symlink_to("missing")
    with pytest.raises(TcdeployError, match=f"{unpacked}/removed cannot be copied to .*it is a symbolic link"):
        cache_bundle.verify(unpacked, run=True, trusted_keys=keys.trusted)
    assert not copied_paths


def test_all_plans_of_a_folder_are_verified(unpacked: Path, keys: Keys) -> None:
    other = make_small(unpacked, bucket=64)
    plans = {plan.plan_key: plan for plan in verify_folder(unpacked, keys.trusted)}
    assert len(plans) == 2 and not plans[key_of(other)].is_from_bundle


def test_a_start_that_rewrites_the_manifest_keeps_the_signature_valid(
    unpacked: Path, small: Packed, keys: Keys
) -> None:
    """Every start rewrites the manifest with the paths of this machine."""
    write_manifest(path_of(unpacked, small.manifest), small.manifest)
    [verified] = verify_folder(unpacked, keys.trusted)
    assert verified.signer is not None


@pytest.mark.parametrize("name", ["6n/unnamed.py", "fxgraph/new/entry", "triton/NEW/kernel.cubin"])
def test_an_unlisted_file_is_an_integrity_error(unpacked: Path, keys: Keys, name: str) -> None:
    path = unpacked / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"cos\nsystem\n")
    with pytest.raises(IntegrityError, match=f"{path} is not listed in any manifest"):
        verify_folder(unpacked, keys.trusted)
    path.unlink()
    assert len(verify_folder(unpacked, keys.trusted)) == 1


HOLD_FOLDER_LOCK = """
import sys
from tcdeploy.cache.folder.leases import folder_lock
with folder_lock(sys.argv[1]):
    print("ready", flush=True)
    sys.stdin.readline()
"""


def test_a_folder_is_verified_after_a_publication_in_progress(unpacked: Path, keys: Keys) -> None:
    """The other process has copied files and not yet written the manifest that lists them."""
    with ThreadPoolExecutor(1) as pool, Child(HOLD_FOLDER_LOCK, unpacked) as child:
        assert child.line() == "ready"
        files = fill(unpacked, {"6n/new.so": 70})
        verifying = pool.submit(verify_folder, unpacked, keys.trusted)
        with pytest.raises(TimeoutError):
            verifying.result(0.5)
        manifest = manifest_for(unpacked, files, bucket=64)
        write_manifest(path_of(unpacked, manifest), manifest)
        child.kill()
        assert {plan.plan_key for plan in verifying.result(30)} >= {key_of(manifest)}


def test_a_folder_that_another_process_holds_for_too_long_is_an_error(
    unpacked: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LOCK_TIMEOUT_S", 0.1)
    with Child(HOLD_FOLDER_LOCK, unpacked) as child:
        assert child.line() == "ready"
        with pytest.raises(TcdeployError, match=f"another process has held the cache folder {unpacked}"):
            verify_folder(unpacked, keys.trusted)


def test_several_processes_may_verify_a_folder_at_once(unpacked: Path, keys: Keys) -> None:
    with leases.shared_folder_lock(unpacked):
        assert len(verify_folder(unpacked, keys.trusted)) == 1


@pytest.mark.parametrize("has_lock_file", [True, False])
def test_a_read_only_folder_is_verified(unpacked: Path, keys: Keys, tmp_path: Path, has_lock_file: bool) -> None:
    if not has_lock_file:
        (unpacked / ".lock").unlink()
    with mounted_tmpfs(tmp_path / "image") as image:
        shutil.copytree(unpacked, image, dirs_exist_ok=True)
        subprocess.run(["mount", "-o", "remount,ro", str(image)], check=True)
        assert len(verify_folder(image, keys.trusted)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as several users")
def test_verifying_a_folder_of_another_user_creates_no_lock_file(unpacked: Path, keys: Keys) -> None:
    """The owner of the folder could not open it."""
    (unpacked / ".lock").unlink()
    os.chown(unpacked, 12001, 12001)
    assert len(verify_folder(unpacked, keys.trusted)) == 1
    assert not (unpacked / ".lock").exists()


def test_files_compiled_here_are_counted_beside_the_signed_ones(unpacked: Path, small: Packed, keys: Keys) -> None:
    """A start compiled one more program, which the signer has not seen."""
    (unpacked / "6n" / "more.so").write_bytes(b"compiled here")
    files = hash_files(unpacked, [*(file.path for file in small.manifest.files), "6n/more.so"])
    write_manifest(path_of(unpacked, small.manifest), replace(small.manifest, files=files))
    [verified] = verify_folder(unpacked, keys.trusted)
    assert verified.signer is not None and (verified.is_from_bundle, verified.files_not_from_bundle) == (True, 1)
    assert verified.paths_not_from_bundle == ("6n/more.so",)
    with pytest.raises(TrustError, match="1 files of plan .* were compiled on this machine, for example 6n/more.so"):
        verify_folder(unpacked, keys.trusted, require_signed=True)


@pytest.mark.parametrize("rewrites_own", [True, False])
def test_a_made_up_manifest_does_not_excuse_a_changed_file(
    unpacked: Path, small: Packed, keys: Keys, rewrites_own: bool
) -> None:
    """The manifest of another plan lists the changed files; the signed header still lists the packed ones."""
    other = make_small(unpacked, seed=5, bucket=64)
    if rewrites_own:
        write_manifest(path_of(unpacked, small.manifest), replace(small.manifest, files=other.files))
    with pytest.raises(IntegrityError, match="does not match its recorded sha256|bytes instead of"):
        verify_folder(unpacked, keys.trusted)


def test_a_rewritten_manifest_is_refused_even_if_the_signed_files_are_there(
    unpacked: Path, small: Packed, keys: Keys
) -> None:
    """A start would use what the manifest lists."""
    (unpacked / "6n/evil.so").write_bytes(b"evil")
    [evil] = hash_files(unpacked, ["6n/evil.so"])
    first, *others = small.manifest.files
    for files in ([*others, evil], [first, *others, replace(evil, path=first.path)]):
        write_manifest(path_of(unpacked, small.manifest), replace(small.manifest, files=tuple(files)))
        with pytest.raises(IntegrityError, match=f"does not list {first.path} with|lists an invalid or duplicate file"):
            verify_folder(unpacked, keys.trusted)


def test_symbolic_links_in_a_folder_are_refused(unpacked: Path, keys: Keys, tmp_path: Path) -> None:
    for name in ("triton", "manifests", "bundles", str(Path(KINDS[0]).parent)):
        shutil.move(unpacked / name, tmp_path / "outside")
        (unpacked / name).symlink_to(tmp_path / "outside")
        with pytest.raises(TrustError, match=f"{unpacked / name} is a symbolic link"):
            verify_folder(unpacked, keys.trusted)
        (unpacked / name).unlink()
        shutil.move(tmp_path / "outside", unpacked / name)
    assert len(verify_folder(unpacked, keys.trusted)) == 1


def test_manifests_of_another_schema_version_are_ignored(unpacked: Path, small: Packed, keys: Keys) -> None:
    (unpacked / "manifests" / ("0" * 16 + ".json")).write_text('{"schema": 3, "plan": {}}')
    assert [plan.plan_key for plan in verify_folder(unpacked, keys.trusted)] == [small.key]
    assert [entry.plan_key for entry in list_plans(unpacked)] == [small.key]
    assert restore_plan(create_staging_folder(str(unpacked)), "f" * 16, rebuild=False) is None


def test_a_rebuild_deletes_the_stored_header(unpacked: Path, small: Packed, keys: Keys) -> None:
    (unpacked / KINDS[2]).write_bytes(b"damaged")
    assert discard_if_damaged(str(unpacked), small.key)
    make_small(unpacked, seed=7)
    [verified] = verify_folder(unpacked, keys.trusted)
    assert not verified.is_from_bundle


def test_a_folder_without_a_plan_is_a_usage_error(keys: Keys, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no plan that finished warming"):
        verify_folder(tmp_path, keys.trusted)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        verify_bundle(tmp_path / "x.tcb", keys.trusted)


# The command


def test_the_command_reports_the_signer(run_cli: Callable[..., Any], small: Packed, unpacked: Path, keys: Keys) -> None:
    for target in (small.bundle, unpacked):
        result = run_cli("cache", "verify", str(target), TCDEPLOY_TRUSTED_KEYS=str(keys.trusted))
        assert result.returncode == 0, result.stderr
        assert f"{small.key} someone/model: {len(KINDS)} files" in result.stdout and "signed by ci" in result.stdout
    result = run_cli("cache", "verify", str(unpacked), "--trusted-keys", str(keys.trusted), "--json")
    [plan] = json.loads(result.stdout)["plans"]
    assert (plan["plan_key"], plan["signer"]["name"]) == (small.key, "ci")


def test_the_command_has_different_exit_codes_for_damage_and_distrust(
    run_cli: Callable[..., Any], small: Packed, unpacked: Path, keys: Keys, tmp_path: Path
) -> None:
    for target in (small.bundle, unpacked):
        result = run_cli("cache", "verify", str(target))
        assert result.returncode == 4, result.stderr
        assert "no trusted key" in result.stderr and "tcdeploy cache trust NAME FILE.pub" in result.stderr
    (unpacked / KINDS[4]).write_bytes(b"something else")
    (tmp_path / "x.tcb").write_bytes(flipped(small.bundle.read_bytes(), 8 * small.bundle.stat().st_size - 4))
    for target, name in ((tmp_path / "x.tcb", "x.tcb"), (unpacked, KINDS[4])):
        result = run_cli("cache", "verify", str(target), TCDEPLOY_TRUSTED_KEYS=str(keys.trusted))
        assert result.returncode == 5, result.stderr
        assert name in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("packed_on", ["NVIDIA H200", "another size", "a CPU", "this GPU"])
def test_outputs_are_compared_only_on_the_gpu_of_the_plan(
    packed_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the command would start the plan, and fail only then."""
    started: list[Recipe] = []
    gpu = H100.gpus[0]
    others = {
        "NVIDIA H200": replace(gpu, name="NVIDIA H200"), "another size": replace(gpu, multiprocessors=114),
        "this GPU": replace(gpu, memory_bytes=1),  # as another driver reports it
    }  # fmt: skip
    gpus = (others[packed_on],) if packed_on in others else ()
    made = make_small(tmp_path, environment=asdict(as_installed(gpus=gpus)))
    monkeypatch.setattr(cache_bundle, "detect_environment", lambda device: H100)
    monkeypatch.setattr(prepare, "prepare", lambda recipe, progress: started.append(recipe) or mock.Mock(records=()))
    if packed_on == "this GPU":
        assert not all(replay.passed for replay in cache_bundle._replay(tmp_path, key_of(made), None))
        assert [recipe.compile for recipe in started] == [False]
        return
    there = f"made for {gpus[0].name if gpus else 'a CPU'}, but here it would run on {gpu.name}"
    with pytest.raises(MismatchError, match=there) as caught:
        cache_bundle._replay(tmp_path, key_of(made), None)
    assert caught.value.exit_code == 3 and not started


@pytest.mark.parametrize("own_bucket", [32, 64])
def test_plans_of_this_gpu_are_run_and_those_of_others_are_reported(
    own_bucket: int, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In either order of the two plans."""
    gpu, started = H100.gpus[0], list[Recipe]()
    gpus = {bucket: gpu if bucket == own_bucket else replace(gpu, name="NVIDIA H200") for bucket in (32, 64)}
    made = {
        bucket: make_small(tmp_path / "cache", bucket=bucket, environment=asdict(as_installed(gpus=(gpus[bucket],))))
        for bucket in gpus
    }
    own = made.pop(own_bucket)
    [other] = made.values()

    def start(recipe: Recipe, progress: object) -> mock.Mock:
        started.append(recipe)
        return mock.Mock(records=own.buckets)

    monkeypatch.setattr(prepare, "prepare", start)
    for here, is_run in ((H100, True), (replace(H100, gpus=()), False)):
        monkeypatch.setattr(cache_bundle, "detect_environment", lambda device, here=here: here)
        if is_run:
            cache_bundle.verify(tmp_path / "cache", run=True, trusted_keys=keys.trusted, json=True)
            document = json.loads(capsys.readouterr().out)
            cache_bundle.verify(tmp_path / "cache", run=True, trusted_keys=keys.trusted)
            reason = f"plan {key_of(other)} was made for NVIDIA H200, but here it would run on {gpu.name}"
            assert f"not run: {reason}" in capsys.readouterr().out
            assert document["skipped"] == {key_of(other): reason} and list(document["replayed"]) == [key_of(own)]
        else:
            with pytest.raises(MismatchError, match="but here it would run on a CPU"):
                cache_bundle.verify(tmp_path / "cache", run=True, trusted_keys=keys.trusted)
        assert [recipe.buckets for recipe in started] == [(own_bucket,)] * 2


def test_a_miss_of_a_replay_names_the_plan_and_not_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_small(tmp_path, environment=asdict(as_installed(gpus=H100.gpus)))
    refused = ThresholdError(f"decode:1 needs a program that is not in {tmp_path}", "nothing was compiled")
    monkeypatch.setattr(cache_bundle, "detect_environment", lambda device: H100)
    monkeypatch.setattr(prepare, "prepare", mock.Mock(side_effect=refused))
    with pytest.raises(ThresholdError, match=f"not all programs of plan {key_of(made)} are in the cache") as caught:
        cache_bundle._replay(tmp_path, key_of(made), None)
    assert str(tmp_path) not in str(caught.value) and caught.value.hint == "tcdeploy cache why lists what differs"
