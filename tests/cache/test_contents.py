"""The files that a start uses are recorded from audit events, and damaged files are found with the reason."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import hashlib
import importlib.machinery
import importlib.util
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tcdeploy.cache.files.records import DamagedFile, FileRecord, find_damage, hash_files, is_cache_file
from tcdeploy.cache.files.usage import FileAccessTracker
from tcdeploy.torch_compat.triton.intermediate_code import INTERMEDIATE_CODE
from tests.conftest import ROOT

EXTENSION = Path(_ctypes.__file__)  # a shared library of every Python


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "cache"
    root.mkdir()
    return root


def put(folder: Path, name: str, content: bytes = b"content") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# Recording


def test_an_opened_file_is_recorded_and_its_neighbour_is_not(folder: Path) -> None:
    opened, other = put(folder, "fxgraph/ab/entry"), put(folder, "fxgraph/ab/another")
    with FileAccessTracker(folder).track() as used:
        opened.read_bytes()
    assert other.exists()
    assert used.paths() == ["fxgraph/ab/entry"]


def test_a_written_file_is_recorded(folder: Path) -> None:
    with FileAccessTracker(folder).track() as used:
        put(folder, "ab/code.py")
    assert used.paths() == ["ab/code.py"]


@pytest.mark.parametrize("rename", [os.rename, os.replace, lambda source, target: Path(source).rename(target)])
def test_a_renamed_file_is_recorded_under_its_new_name(folder: Path, rename: object) -> None:
    staging = put(folder, "ab/.17.tmp")
    with FileAccessTracker(folder).track() as used:
        rename(staging, folder / "ab" / "entry")  # type: ignore[operator]
    assert used.paths() == ["ab/entry"]


def test_a_loaded_library_is_recorded(folder: Path) -> None:
    """torch loads its libraries this way; the dynamic loader opens them without a Python audit event."""
    library = put(folder, "ab/cabc.main.so", EXTENSION.read_bytes())
    with FileAccessTracker(folder).track() as used:
        ctypes.CDLL(str(library))
    assert used.paths() == ["ab/cabc.main.so"]


def test_an_imported_extension_module_is_recorded(folder: Path) -> None:
    path = folder / "ab" / "_ctypes.so"
    put(folder, "ab/_ctypes.so", EXTENSION.read_bytes())
    loader = importlib.machinery.ExtensionFileLoader("_ctypes", str(path))
    spec = importlib.util.spec_from_file_location("_ctypes", path, loader=loader)
    assert spec is not None
    with FileAccessTracker(folder).track() as used:
        importlib.util.module_from_spec(spec)
    assert used.paths() == ["ab/_ctypes.so"]


def test_files_in_a_subprocess_s_arguments_are_recorded_also_inside_a_longer_text(folder: Path) -> None:
    names = [f"ab/{letter}.txt" for letter in "abcd"]
    a, b, c, d = (str(put(folder, name)) for name in names)
    program = f"import sys; first = '{a}'; second = \"{b}\"\nthird = {c} \n"
    with FileAccessTracker(folder).track() as used:
        subprocess.run(["true", program, f"--output={d}"], check=True)
    assert used.paths() == names


def test_bytes_and_path_objects_are_recorded_like_strings(folder: Path) -> None:
    first, second = put(folder, "ab/first"), put(folder, "ab/second")
    with FileAccessTracker(folder).track() as used:
        os.close(os.open(os.fsencode(first), os.O_RDONLY))
        second.open().close()
        open(os.open(first, os.O_RDONLY)).close()  # a file descriptor holds no path
    assert used.paths() == ["ab/first", "ab/second"]


def test_files_with_the_same_stem_are_recorded_too(folder: Path) -> None:
    for name in ("cabc.cpp", "cabc.main.so", "cabc.main.cpp", "cabcd.so", "other.so"):
        put(folder, f"ab/{name}")
    put(folder, "xy/cabc.so")
    (folder / "ab" / "cabc.link").symlink_to(folder / "ab" / "other.so")
    (folder / "ab" / "cabc.folder").mkdir()
    with FileAccessTracker(folder).track() as used:
        (folder / "ab" / "cabc.cpp").read_bytes()
    assert used.paths() == ["ab/cabc.cpp", "ab/cabc.main.cpp", "ab/cabc.main.so"]


def test_a_folder_of_triton_s_cache_is_recorded_without_intermediate_code(folder: Path) -> None:
    for name in ("KEY/kernel.cubin", "KEY/kernel.json", "KEY/__grp__kernel.json", "OTHER/kernel.cubin"):
        put(folder, f"triton/{name}")
    for suffix in INTERMEDIATE_CODE:
        put(folder, f"triton/KEY/kernel{suffix}")
    put(folder, "triton/KEY/tmp.pid_1/kernel.ptx")
    with FileAccessTracker(folder).track() as used:
        (folder / "triton" / "KEY" / "kernel.json").read_bytes()
    assert used.paths() == ["triton/KEY/__grp__kernel.json", "triton/KEY/kernel.cubin", "triton/KEY/kernel.json"]


def test_locks_temporary_files_and_bookkeeping_are_left_out(folder: Path) -> None:
    names = (
        "ab/code.py", "ab/code.lock", "ab/code.tmp", "ab/.hidden", "ab/.17.tmp", "locks/x.lock", "locks/plain", "lock",
        "manifests/key.json", "leases/key", "bundles/one/index.json", "top-level", ".lock", "triton/KEY/lock",
    )  # fmt: skip
    with FileAccessTracker(folder).track() as used:
        for name in names:
            put(folder, name).read_bytes()
    assert used.paths() == ["ab/code.py"]


def test_deleted_files_folders_and_links_to_outside_are_left_out(folder: Path, tmp_path: Path) -> None:
    put(tmp_path, "outside/file")
    (folder / "ab").mkdir()
    (folder / "ab" / "link").symlink_to(tmp_path / "outside" / "file")
    gone = put(folder, "ab/gone")
    with FileAccessTracker(folder).track() as used:
        gone.read_bytes()
        (folder / "ab" / "link").read_bytes()
        (tmp_path / "outside" / "file").read_bytes()
        with contextlib.suppress(IsADirectoryError):
            (folder / "ab").read_bytes()
        with contextlib.suppress(FileNotFoundError):
            (folder / "ab" / "never").read_bytes()
    gone.unlink()
    assert used.paths() == []


def test_a_sibling_folder_with_the_same_prefix_is_not_the_folder(folder: Path) -> None:
    other = put(folder.with_name("cache2"), "ab/file")
    with FileAccessTracker(folder).track() as used:
        other.read_bytes()
    assert used.paths() == []


def test_a_symlink_to_the_folder_is_the_folder(folder: Path, tmp_path: Path) -> None:
    """torch uses the real path, even if the tracker was constructed with a link."""
    link = tmp_path / "link"
    link.symlink_to(folder, target_is_directory=True)
    put(folder, "ab/file")
    with FileAccessTracker(link).track() as used:
        (folder / "ab" / "file").read_bytes()
    assert used.paths() == ["ab/file"]


def test_regular_expression_characters_in_the_folder_s_name_are_literal(tmp_path: Path) -> None:
    odd = tmp_path / "a+(b) [c].*"
    put(odd, "ab/file")
    with FileAccessTracker(odd).track() as used:
        (odd / "ab" / "file").read_bytes()
    assert used.paths() == ["ab/file"]


def test_nothing_is_recorded_before_and_after_tracking(folder: Path) -> None:
    before, after = put(folder, "ab/before"), put(folder, "ab/after")
    used = FileAccessTracker(folder)
    before.read_bytes()
    with used.track():
        pass
    after.read_bytes()
    assert used.paths() == []


def test_two_trackers_in_turn_record_their_own_files(folder: Path) -> None:
    put(folder, "ab/first"), put(folder, "ab/second")
    with FileAccessTracker(folder).track() as first:
        (folder / "ab" / "first").read_bytes()
    with FileAccessTracker(folder).track() as second:
        (folder / "ab" / "second").read_bytes()
    assert (first.paths(), second.paths()) == (["ab/first"], ["ab/second"])


def test_tracking_ends_with_an_exception_too(folder: Path) -> None:
    path, used = put(folder, "ab/file"), FileAccessTracker(folder)
    with pytest.raises(ValueError), used.track():
        raise ValueError
    path.read_bytes()
    assert used.paths() == []


# Cache files


@pytest.mark.parametrize(
    "path",
    ["ab/cabc.so", "fxgraph/ab/key/entry", "triton/KEY/kernel.json", "toolchain/0.json", "ab/locks", "ab/a.lock.py"],
)
def test_it_is_a_cache_file(path: str) -> None:
    assert is_cache_file(path)


@pytest.mark.parametrize(
    "path",
    ["top", "locks/a", "manifests/a.json", "leases/a", "bundles/a/b", "ab/a.lock", "ab/lock", "ab/.a", "ab/a.tmp"],
)
def test_it_is_not_a_cache_file(path: str) -> None:
    assert not is_cache_file(path)


# Damage


@pytest.fixture
def files(folder: Path) -> tuple[FileRecord, ...]:
    contents = {"ab/large": random.Random(0).randbytes((1 << 20) + 17), "ab/empty": b"", "xy/small": b"small"}
    for name, content in contents.items():
        put(folder, name, content)
    return hash_files(folder, reversed(contents))


def test_records_hold_path_size_and_sha256(folder: Path, files: tuple[FileRecord, ...]) -> None:
    assert [file.path for file in files] == ["ab/empty", "ab/large", "xy/small"]
    for file in files:
        content = (folder / file.path).read_bytes()
        assert (file.bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    assert find_damage(folder, files) == []


def test_hashing_a_missing_file_is_an_error(folder: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hash_files(folder, ["ab/missing"])


@pytest.mark.parametrize("seed", range(20))
def test_a_single_flipped_bit_is_damage(folder: Path, files: tuple[FileRecord, ...], seed: int) -> None:
    """The first seed flips a bit of the last byte, in the second chunk."""
    path = folder / "ab" / "large"
    content = bytearray(path.read_bytes())
    position = len(content) - 1 if seed == 0 else random.Random(seed).randrange(len(content))
    content[position] ^= 1 << seed % 8
    path.write_bytes(content)
    assert find_damage(folder, files) == [DamagedFile("ab/large", "does not match its recorded sha256")]


def test_every_kind_of_damage_has_a_reason_in_the_order_of_the_files(folder: Path, tmp_path: Path) -> None:
    names = ["1/cut", "2/grown", "3/gone", "4/folder-gone", "5/link", "6/folder", "7/fifo", "8/whole"]
    for name in names:
        put(folder, name)
    files = hash_files(folder, names)
    (folder / names[0]).write_bytes(b"con")
    (folder / names[1]).write_bytes(b"content and more")
    (folder / names[2]).unlink()
    shutil.rmtree((folder / names[3]).parent)
    twin = put(tmp_path, "twin")  # the same bytes in another file
    for name, make in ((names[4], lambda path: path.symlink_to(twin)), (names[5], Path.mkdir), (names[6], os.mkfifo)):
        (folder / name).unlink()
        make(folder / name)
    assert find_damage(folder, files) == [
        DamagedFile(names[0], "has 3 bytes instead of 7"),
        DamagedFile(names[1], "has 16 bytes instead of 7"),
        DamagedFile(names[2], "is missing"),
        DamagedFile(names[3], "is missing"),
        DamagedFile(names[4], "is not a regular file"),
        DamagedFile(names[5], "is not a regular file"),
        DamagedFile(names[6], "is not a regular file"),
    ]


def test_a_file_in_place_of_a_folder_cannot_be_read(folder: Path, files: tuple[FileRecord, ...]) -> None:
    shutil.rmtree(folder / "ab")
    (folder / "ab").write_text("")
    reasons = {damage.reason for damage in find_damage(folder, files)}
    assert reasons == {"cannot be read: Not a directory"}


CHECKER = """
import os, sys
from tcdeploy.cache.files.records import FileRecord, find_damage
os.setuid(65534)
[damage] = find_damage(".", [FileRecord("xy/small", 5, "0" * 64)])
print(damage.reason)
"""


def test_a_file_without_read_permission_is_damage(folder: Path, files: tuple[FileRecord, ...]) -> None:
    if os.getuid():
        pytest.skip("only root can change its user ID")
    (folder / "xy" / "small").chmod(0)
    folder.chmod(0o755)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", CHECKER], cwd=folder, env=environ, capture_output=True, text=True, check=True
    )
    assert result.stdout == "cannot be read: Permission denied\n"
