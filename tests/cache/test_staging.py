"""Staging folders and their journals, without torch: what a start that did not finish leaves for the next one."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tcdeploy.cache.files.records import FileRecord, hash_files, is_cache_file
from tcdeploy.cache.files.usage import FileAccessTracker
from tcdeploy.cache.folder.access import make_private_folder
from tcdeploy.cache.folder.layout import HEADERS_DIR
from tcdeploy.cache.folder.leases import acquire_lease, is_leased
from tcdeploy.cache.inventory import UnfinishedPlan, collect_garbage, list_unfinished
from tcdeploy.cache.staging import folder as staging_module
from tcdeploy.cache.staging import journal, restore
from tcdeploy.cache.staging.folder import StagingFolder, create_private_copy, create_staging_folder, own_staging_folder
from tcdeploy.cache.staging.journal import JOURNAL, LOCK, FinishedBucket, abandoned_folders, read_journal
from tcdeploy.cache.staging.recording import hash_used_files, record_finished_bucket
from tcdeploy.cache.staging.restore import copy_finished_buckets, take_over_finished_buckets
from tcdeploy.cache.trust.ownership import check_ownership
from tcdeploy.errors import TrustError
from tcdeploy.host.temporary_files import HOST

FIRST, SECOND = "fxgraph/aa/first", "ab/second.so"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "cache"
    make_private_folder(folder)
    yield folder
    staging_module._own_folders.pop(str(folder), None)


def start(root: Path) -> StagingFolder:
    return create_staging_folder(str(root))


def write(folder: str | Path, path: str, content: bytes = b"program") -> str:
    file = Path(folder, path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return path


def end(folder: StagingFolder) -> None:
    """What the kernel does when a process ends, even by kill -9."""
    os.close(folder._lock)


def paths_in(folder: str | Path) -> set[str]:
    files = (path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())
    return set(files) - {LOCK, JOURNAL}


# Ends of a start


def test_an_exit_keeps_the_finished_buckets_of_a_start_that_failed(root: Path) -> None:
    """SIGTERM, Ctrl-C, an error in a later bucket: exit handlers run, and the next start goes on."""
    failed = start(root)
    failed.add_to_journal("plan", [write(failed.path, FIRST)])
    write(failed.path, SECOND)  # of a bucket that did not finish
    failed.remove()
    end(failed)
    following = start(root)
    assert take_over_finished_buckets(following, "plan") == (1, 1)
    assert paths_in(following.path) == {FIRST}
    assert not Path(failed.path).exists()


@pytest.mark.parametrize(
    ("is_cold", "outcome", "is_kept"), [(True, "hit", True), (False, "miss", True), (False, "hit", False)]
)
def test_files_are_kept_after_a_bucket_that_may_have_new_ones(
    is_cold: bool, outcome: str, is_kept: bool, root: Path
) -> None:
    """A hit in a cold start: its programs belong to another plan, and its Triton kernels are new."""
    failed = start(root)
    tracker = FileAccessTracker(failed.path)
    with tracker.track():
        write(failed.path, FIRST)
    record: Any = SimpleNamespace(outcome=outcome)
    record_finished_bucket(failed, "plan", tracker, is_cold, record)
    end(failed)
    following = start(root)
    take_over_finished_buckets(following, "plan")
    assert paths_in(following.path) == ({FIRST} if is_kept else set())


def test_ls_names_the_finished_buckets_of_starts_that_failed(root: Path, run_cli: Any) -> None:
    """Those of a running start, and of a plan that has been completed since, are left out."""
    failed, running = start(root), start(root)
    failed.add_to_journal("interrupted", [write(failed.path, FIRST)])
    failed.add_to_journal("interrupted", [write(failed.path, SECOND, b"two")])
    failed.add_to_journal("complete", [write(failed.path, "ab/third.so")])
    running.add_to_journal("running", [write(running.path, FIRST)])
    end(failed)
    (root / "manifests").mkdir()
    assert [plan.plan_key for plan in list_unfinished(root)] == ["complete", "interrupted"]
    (root / "manifests/complete.json").touch()
    assert list_unfinished(root) == [UnfinishedPlan("interrupted", finished=2, files=2, bytes=10)]
    (root / "manifests/complete.json").unlink()
    listed = run_cli("cache", "ls", str(root))
    assert f"no start has completed a plan in {root}" in listed.stdout
    assert "plan interrupted is not complete; finished buckets or packages: 2 (2 files, " in listed.stdout
    document = json.loads(run_cli("cache", "ls", str(root), "--json").stdout)
    assert document["plans"] == [] and [plan["finished"] for plan in document["unfinished"]] == [1, 2]


def test_a_running_start_gets_the_finished_buckets_of_another(root: Path) -> None:
    other, running = start(root), start(root)
    other.add_to_journal("plan", [write(other.path, FIRST)])
    copy_finished_buckets(running)
    assert paths_in(running.path) == {FIRST}


def test_measured_configurations_of_a_compile_worker_are_listed_though_no_program_reads_them(root: Path) -> None:
    worker, running = start(root), start(root)
    worker.add_to_journal("plan", [write(worker.path, FIRST), write(worker.path, "ab/kernel.best_config")])
    copy_finished_buckets(running)
    listed = hash_used_files(running, [], None, is_first_prepare=True)
    assert [file.path for file in listed] == ["ab/kernel.best_config"]
    later = start(root)
    write(later.path, "ab/kernel.best_config")
    earlier: Any = SimpleNamespace(files=listed)
    assert hash_used_files(later, [], earlier, is_first_prepare=True) == listed, "a warm start keeps it"


def test_a_folder_that_disappears_while_its_files_are_copied_is_skipped(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ends, or another start deletes it."""
    gone, other, running = sorted((start(root) for _ in range(3)), key=lambda folder: folder.path)
    gone.add_to_journal("plan", [write(gone.path, FIRST)])
    other.add_to_journal("plan", [write(other.path, SECOND)])

    def read_and_remove(folder: Path) -> list[FinishedBucket]:
        buckets = read_journal(folder)
        if str(folder) == gone.path:
            shutil.rmtree(folder)
        return buckets

    monkeypatch.setattr(restore, "read_journal", read_and_remove)
    copy_finished_buckets(running)
    assert paths_in(running.path) == {SECOND}
    assert not Path(gone.path).exists()


def test_an_exit_removes_a_folder_without_a_journal(root: Path) -> None:
    finished = start(root)
    finished.add_to_journal("plan", [write(finished.path, FIRST)])
    finished.discard_journal()
    finished.remove()
    assert not Path(finished.path).exists()


def test_buckets_that_were_taken_over_survive_a_second_kill(root: Path) -> None:
    """The second start is killed before it has compiled anything."""
    first = start(root)
    first.add_to_journal("plan", [write(first.path, FIRST)])
    end(first)
    second = start(root)
    assert take_over_finished_buckets(second, "plan") == (1, 1)
    end(second)
    third = start(root)
    assert take_over_finished_buckets(third, "plan") == (1, 1)
    assert paths_in(third.path) == {FIRST}


def test_another_plan_copies_finished_buckets_and_leaves_the_journal(root: Path) -> None:
    first = start(root)
    first.add_to_journal("plan", [write(first.path, FIRST)])
    end(first)
    other = start(root)
    assert take_over_finished_buckets(other, "other plan") == (0, 1)
    assert paths_in(other.path) == {FIRST} and not Path(other.path, JOURNAL).exists()
    assert take_over_finished_buckets(start(root), "plan") == (1, 1)
    assert not Path(first.path).exists()


def test_a_second_plan_of_a_process_keeps_the_journal_of_the_first(root: Path) -> None:
    folder = start(root)
    folder.add_to_journal("plan", [write(folder.path, FIRST)])
    write(folder.path, SECOND)
    folder.clear()
    assert paths_in(folder.path) == {FIRST}
    assert not Path(folder.path, SECOND).parent.exists(), "Triton skips a kernel whose folder exists"
    assert len(read_journal(Path(folder.path))) == 1


def test_a_file_is_recorded_again_only_if_it_has_changed(root: Path) -> None:
    folder = start(root)
    folder.add_to_journal("plan", [write(folder.path, FIRST)])
    folder.add_to_journal("plan", [FIRST, write(folder.path, SECOND)])
    write(folder.path, FIRST, b"timed again")
    folder.add_to_journal("plan", [FIRST, SECOND])
    recorded = [[file.path for file in bucket.files] for bucket in read_journal(Path(folder.path))]
    assert recorded == [[FIRST], [SECOND], [FIRST]]
    end(folder)
    following = start(root)
    assert take_over_finished_buckets(following, "plan") == (1, 3)
    assert Path(following.path, FIRST).read_bytes() == b"timed again"


# Damage


BROKEN_LINES: dict[str, Any] = {
    "not JSON": "{",
    "no object": [],
    "no files": {"plan": "plan"},
    "a number as path": {"plan": "plan", "files": [{"path": 5, "bytes": 7, "sha256": "0" * 64}]},
    "an absolute path": {"plan": "plan", "files": [{"path": "/etc/x", "bytes": 7, "sha256": "0" * 64}]},
    "a path above": {"plan": "plan", "files": [{"path": "fxgraph/../../x", "bytes": 7, "sha256": "0" * 64}]},
    "an unknown field": {"plan": "plan", "files": [{"path": FIRST, "bytes": 7, "sha256": "0" * 64, "x": 1}]},
    "a hidden file": {"plan": "plan", "files": [{"path": "ab/.hidden", "bytes": 7, "sha256": "0" * 64}]},
}


@pytest.mark.parametrize("name", BROKEN_LINES)
def test_a_damaged_line_of_a_journal_is_skipped(root: Path, name: str) -> None:
    killed = start(root)
    line = BROKEN_LINES[name]
    Path(killed.path, JOURNAL).write_text((line if isinstance(line, str) else json.dumps(line)) + "\n")
    killed.add_to_journal("plan", [write(killed.path, FIRST)])
    end(killed)
    following = start(root)
    assert take_over_finished_buckets(following, "plan") == (1, 1)
    assert paths_in(following.path) == {FIRST} and not Path(killed.path).exists()


def test_a_changed_file_of_a_journal_is_not_taken_over(root: Path) -> None:
    killed = start(root)
    killed.add_to_journal("plan", [write(killed.path, FIRST), write(killed.path, SECOND)])
    write(killed.path, FIRST, b"changed")
    end(killed)
    following = start(root)
    take_over_finished_buckets(following, "plan")
    assert paths_in(following.path) == {SECOND}


def test_a_staging_folder_with_a_link_is_not_used_and_does_not_stop_a_start(root: Path, tmp_path: Path) -> None:
    killed = start(root)
    killed.add_to_journal("plan", [write(killed.path, FIRST)])
    end(killed)
    shutil.move(Path(killed.path, "fxgraph"), tmp_path / "outside")
    Path(killed.path, "fxgraph").symlink_to(tmp_path / "outside")
    assert take_over_finished_buckets(start(root), "plan") == (1, 0)
    assert (tmp_path / "outside").exists()


def test_a_link_that_is_named_like_a_staging_folder_is_not_followed(root: Path, tmp_path: Path) -> None:
    write(tmp_path / "outside", FIRST)
    (root / f".start-{HOST}-link").symlink_to(tmp_path / "outside")
    assert abandoned_folders(root) == []
    collect_garbage(root, None, None)
    assert (tmp_path / "outside" / FIRST).exists()


# Locks


def test_a_staging_folder_in_use_is_not_abandoned(root: Path) -> None:
    folder = start(root)
    assert abandoned_folders(root) == []
    end(folder)
    assert abandoned_folders(root) == [Path(folder.path)]


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_folder_whose_lock_cannot_be_read_counts_as_in_use(
    root: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS emulates flock, and some file systems have no locks."""
    end(start(root))

    def fail(*arguments: Any) -> None:
        raise OSError(number, os.strerror(number))

    acquire_lease(str(root), "plan")
    monkeypatch.setattr(fcntl, "flock", fail)
    assert abandoned_folders(root) == []
    assert is_leased(root, "plan")


def test_locks_are_opened_for_writing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS refuses an exclusive lock on a file that is open for reading."""
    folder, locks = start(root), []

    def record(file: Any, operation: int) -> None:
        locks.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE)

    acquire_lease(str(root), "plan")
    monkeypatch.setattr(fcntl, "flock", record)
    abandoned_folders(root), is_leased(root, "plan")
    assert locks == [os.O_RDWR, os.O_RDWR], folder.path


def test_the_folder_of_another_host_is_copied_from_and_kept_for_a_day(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a network file system, locks of other hosts may be invisible."""
    monkeypatch.setattr(staging_module, "HOST_PREFIX", ".start-0123abcd-")
    foreign = start(root)
    monkeypatch.undo()
    foreign.add_to_journal("plan", [write(foreign.path, FIRST)])
    end(foreign)
    following = start(root)
    assert take_over_finished_buckets(following, "plan") == (0, 1)
    assert paths_in(following.path) == {FIRST} and Path(foreign.path).exists()
    yesterday = time.time() - journal.LONGEST_START_S - 1
    os.utime(foreign.path, (yesterday, yesterday))
    assert abandoned_folders(root) == [Path(foreign.path)]


# Publishing


def record(path: str, content: bytes) -> FileRecord:
    return FileRecord(path, len(content), hashlib.sha256(content).hexdigest())


def test_the_file_of_another_start_of_the_plan_is_not_overwritten(root: Path) -> None:
    """Two starts of a new plan: a kill of the second before its manifest must leave the first one's files."""
    write(root, FIRST, b"of the first start")
    published = record(FIRST, b"of the first start")
    second = start(root)
    files = hash_files(second.path, [write(second.path, FIRST, b"of the second start")])
    second.publish(files, [published])
    assert (root / FIRST).read_bytes() == b"of the first start"
    assert (root / "conflicts" / files[0].sha256).read_bytes() == b"of the second start"


def test_a_copied_file_that_was_deleted_meanwhile_is_published_again(root: Path) -> None:
    write(root, FIRST)
    folder = start(root)
    files = [record(FIRST, b"program")]
    assert folder.fill(files) == []
    (root / FIRST).unlink()
    folder.publish(files, [])
    assert (root / FIRST).read_bytes() == b"program"


def test_deferred_files_are_copied_later_and_listed_until_then(root: Path) -> None:
    files = [record(write(root, path), b"program") for path in (FIRST, SECOND)]
    folder = start(root)
    assert not folder.fill(files[:1]) and not folder.defer(files[1:])
    assert paths_in(folder.path) == {FIRST}
    assert set(files) <= set(hash_used_files(folder, [FIRST, SECOND], None, is_first_prepare=True))
    folder.publish(files, files)
    assert not folder.fill_deferred()
    assert paths_in(folder.path) >= {FIRST, SECOND} and not folder.deferred


def test_a_deferred_file_that_is_missing_or_cut_is_reported_at_once_and_a_changed_one_later(root: Path) -> None:
    third = "ac/third.so"
    files = [record(write(root, path), b"program") for path in (FIRST, SECOND, third)]
    Path(root, FIRST).unlink()
    write(root, SECOND, b"prog")
    write(root, third, b"pr0gram")
    folder = start(root)
    assert [damage.path for damage in folder.defer(files)] == [FIRST, SECOND]
    folder.clear()
    assert not folder.deferred and not folder.defer(files[2:])
    [damage] = folder.fill_deferred()
    assert (damage.path, damage.reason) == (third, "does not match its recorded sha256")
    assert not paths_in(folder.path)


def test_timings_of_max_autotune_are_cache_files() -> None:
    assert is_cache_file(f"cache/{'0a' * 32}")
    assert not any(map(is_cache_file, ("cache/models", f"cache/{'0a' * 32}/x", "cache/x/y")))


# Precompiled headers


def compile_header(folder: StagingFolder, content: bytes = b"image") -> None:
    write(folder.path, f"{HEADERS_DIR}/x.h", b"source")
    write(folder.path, f"{HEADERS_DIR}/x.h.gch", content)


def test_a_published_header_is_linked_into_the_next_start(root: Path) -> None:
    first = start(root)
    compile_header(first)
    first.publish([], [])
    second = start(root)
    second.link_headers()
    assert Path(second.headers_folder, "x.h.gch").samefile(root / HEADERS_DIR / "x.h.gch")
    assert Path(second.headers_folder, "x.h").read_bytes() == b"source"


@pytest.mark.parametrize("name", ["x.h", "x.h.gch", "x.h.gch.json"])
@pytest.mark.parametrize("is_removed", [False, True])
def test_a_damaged_header_is_compiled_again(root: Path, name: str, is_removed: bool) -> None:
    first = start(root)
    compile_header(first)
    first.publish([], [])
    (root / HEADERS_DIR / name).unlink()
    if not is_removed:
        write(root, f"{HEADERS_DIR}/{name}", b"damag")
    second = start(root)
    second.link_headers()
    assert paths_in(second.path) == set()
    compile_header(second, b"image again")
    second.publish([], [])
    third = start(root)
    third.link_headers()
    assert Path(third.headers_folder, "x.h.gch").read_bytes() == b"image again"


# Private copies


def test_the_private_copy_of_a_killed_start_is_removed_by_the_next_one(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    killed, running = create_private_copy(str(root)), create_private_copy(str(root))
    end(killed)
    create_private_copy(str(root))
    assert not Path(killed.path).exists() and Path(running.path).exists()


def test_a_private_copy_that_others_could_replace_is_refused_and_leaves_nothing(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(shared))
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TrustError):
        create_private_copy(str(root))
    assert not list(shared.iterdir()) and len(os.listdir("/proc/self/fd")) == descriptors


def test_a_second_start_of_a_process_reuses_its_private_copy(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a start from packages that did not fit. A private copy has no lock file, so it is empty then."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = create_private_copy(str(root))
    write(first.path, "5m/kernel.so")
    assert own_staging_folder(str(root)) is first
    assert paths_in(first.path) == set() and first.is_usable


def test_finished_buckets_are_one_line_each(root: Path) -> None:
    folder = start(root)
    folder.add_to_journal("plan", [write(folder.path, FIRST)])
    [line] = Path(folder.path, JOURNAL).read_text().splitlines()
    [bucket] = read_journal(Path(folder.path))
    assert bucket == FinishedBucket("plan", (record(FIRST, b"program"),))
    assert json.loads(line) == {"plan": "plan", "files": [asdict(file) for file in bucket.files]}


# A cache folder that other users can change


OTHER_USER = 12004
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as several users")


@pytest.fixture
def shared_root(root: Path) -> Path:
    root.chmod(0o777)
    return root


def test_compared_files_cannot_be_replaced_by_other_users(shared_root: Path) -> None:
    """They could rename a staging folder in the cache folder, and put another one in its place."""
    write(shared_root, FIRST)
    started = create_staging_folder(str(shared_root), is_trusted=True)
    check_ownership(started.path, must_exist=True)
    assert not list(shared_root.glob(".start-*"))
    assert started.fill(hash_files(shared_root, [FIRST])) == []
    write(started.path, SECOND, b"new")
    started.publish(hash_files(started.path, [FIRST, SECOND]), [])
    assert (shared_root / SECOND).read_bytes() == b"new"
    started.remove()
    assert not Path(started.parent).exists()


def test_a_worker_shares_the_private_folder_of_its_start(shared_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = create_staging_folder(str(shared_root), is_trusted=True)
    monkeypatch.setattr(staging_module, "worker_parent", started.parent)
    worker = create_staging_folder(str(shared_root), is_trusted=True)
    assert worker.parent == started.parent and worker.path != started.path
    worker.add_to_journal("plan", [write(worker.path, FIRST)])
    copy_finished_buckets(started)
    assert Path(started.path, FIRST).read_bytes() == b"program"
    worker.remove()
    assert Path(started.path).exists()
    monkeypatch.setattr(staging_module, "worker_parent", None)
    started.remove()


def test_headers_are_not_shared_with_users_who_can_change_them(shared_root: Path) -> None:
    make_header(shared_root)
    started = create_staging_folder(str(shared_root), is_trusted=True)
    started.link_headers()
    assert not Path(started.headers_folder).exists()
    started.remove()


@needs_root
def test_a_header_of_another_user_is_not_linked(root: Path) -> None:
    """The owner could change the header after it was compared."""
    compiled = make_header(root)
    os.chown(compiled, OTHER_USER, OTHER_USER)
    started = start(root)
    started.link_headers()
    assert not Path(started.headers_folder, compiled.name).exists()


def make_header(root: Path) -> Path:
    folder = root / HEADERS_DIR
    folder.mkdir()
    (folder / "x.h").write_text("int x;")
    (folder / "x.h.gch").write_bytes(b"image")
    records = [asdict(file) for file in hash_files(folder, ["x.h", "x.h.gch"])]
    (folder / "x.h.gch.json").write_text(json.dumps(records))
    return folder / "x.h.gch"


def test_a_temporary_folder_that_other_users_can_change_is_reported(
    shared_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The start continues, because a pod has no other folder."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    create_staging_folder(str(shared_root), is_trusted=True).remove()
    assert f"other users can change {tmp_path / 'tmp'}" in caplog.text


@pytest.mark.parametrize("name", [JOURNAL, LOCK])
def test_a_fifo_in_a_staging_folder_does_not_stop_a_start(root: Path, name: str) -> None:
    killed = root / ".start-killed"
    killed.mkdir()
    os.mkfifo(killed / name)
    assert read_journal(killed) == [] and take_over_finished_buckets(start(root), "plan").num_entries == 0
