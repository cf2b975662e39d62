"""Temporary files and folders of killed processes are removed, and those of running ones are not."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tcdeploy.host.temporary_files import HOST, temporary_file, temporary_folder


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def killed_inside(make: Callable[[], AbstractContextManager[Path]]) -> None:
    """Enter the context in a child process and kill the process."""
    if child := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        return
    with make() as path:
        (path if path.is_file() else path / "content").write_bytes(b"half a bundle")
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def temporary_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_a_file_is_deleted_at_the_end_unless_it_was_renamed(tmp_path: Path) -> None:
    with temporary_file(tmp_path / "x.tcb") as path:
        assert path.name.startswith(".x.tcb-") and path.parent == tmp_path
    assert names_in(tmp_path) == []
    with temporary_file(tmp_path / "x.tcb") as path:
        path.write_bytes(b"whole")
        os.replace(path, tmp_path / "x.tcb")
    assert names_in(tmp_path) == ["x.tcb"] and (tmp_path / "x.tcb").read_bytes() == b"whole"


def test_the_file_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    killed_inside(lambda: temporary_file(tmp_path / "x.tcb"))
    [left] = names_in(tmp_path)
    assert left.startswith(".x.tcb-") and left.endswith(".tmp")
    with temporary_file(tmp_path / "other.tcb") as path:
        assert names_in(tmp_path) == [path.name]


def test_the_file_of_a_running_process_stays(tmp_path: Path) -> None:
    with temporary_file(tmp_path / "x.tcb") as first, temporary_file(tmp_path / "x.tcb") as second:
        assert first != second and sorted([first.name, second.name]) == names_in(tmp_path)


def test_the_folder_of_a_killed_process_is_removed_by_the_next_of_any_purpose(temporary_root: Path) -> None:
    killed_inside(lambda: temporary_folder("push"))
    [left] = names_in(temporary_root)
    assert left.startswith("tcdeploy-push-") and (temporary_root / left / "content").exists()
    with temporary_folder("fetch") as path:
        assert names_in(temporary_root) == [path.name] and path.stat().st_mode & 0o777 == 0o700
        with temporary_folder("push"):
            assert path.exists()
    assert names_in(temporary_root) == []


def test_other_names_links_and_files_of_other_hosts_stay(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / f".link-{HOST}-{'0' * 12}.tmp").symlink_to(tmp_path / "precious")
    for name in (".x.tcb-00000000-000000000000.tmp", f"x.tcb-{HOST}-{'0' * 12}.tmp", ".x.tmp"):
        (tmp_path / name).write_bytes(b"")
    before = names_in(tmp_path)
    with temporary_file(tmp_path / "x.tcb"):
        pass
    assert names_in(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_the_leftovers_of_another_user_stay(temporary_root: Path) -> None:
    killed_inside(lambda: temporary_folder("push"))
    [left] = temporary_root.iterdir()
    os.chown(left, 12345, 12345)
    with temporary_folder("push"):
        assert left.exists()


def test_a_file_that_cannot_be_created_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), contextlib.ExitStack() as stack:
        stack.enter_context(temporary_file(tmp_path / "missing" / "x.tcb"))
