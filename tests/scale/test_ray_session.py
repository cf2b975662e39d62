"""What another user can do to the Ray that `tcdeploy deploy` starts, and to one that it connects to, by its files."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.errors import ModelError, TrustError, UsageError
from tcdeploy.scale import ray_session
from tcdeploy.scale.ray_session import own_cluster, private_session, token_problem
from tests.conftest import TINY

OTHER_USER = 12002
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as several users")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private folder with a short path, in which Ray's files are created."""
    for name in (*ray_session.HAPROXY_FILES, "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN", "RAY_AUTH_MODE", "RAY_ADDRESS"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="") as path:
        monkeypatch.setenv("RAY_TMPDIR", path)
        yield Path(path)


def modes(path: Path) -> tuple[int, int]:
    return path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777


def test_the_token_and_all_files_of_ray_are_in_a_new_private_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """With /tmp, as by default."""
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp")
    umask = os.umask(0o022)
    try:
        with private_session() as session:
            token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
            assert modes(token) == (0o600, 0o700) and len(token.read_text()) == 64
            assert {Path(os.environ[name]) for name in ray_session.HAPROXY_FILES} <= {
                session.parent, *(session.parent / name for name in ray_session.HAPROXY_FILES.values())
            }  # fmt: skip
            (session.parent / "created by Ray").touch()
            assert modes(session.parent / "created by Ray") == (0o600, 0o700)
        assert not session.parent.exists() and os.umask(0o022) == 0o022
    finally:
        os.umask(umask)


def test_the_variables_are_removed_with_the_folder_that_they_name(folder: Path) -> None:
    """A second session in the same process would have the token path of the first."""
    tokens = []
    for _ in range(2):
        with private_session():
            tokens.append(Path(os.environ["RAY_AUTH_TOKEN_PATH"]).read_text())
    assert len(set(tokens)) == 2 and "RAY_AUTH_TOKEN_PATH" not in os.environ


def test_the_folder_is_kept_if_an_error_names_its_logs(folder: Path) -> None:
    with pytest.raises(ModelError), private_session() as session:
        session.mkdir()
        raise ModelError("the model cannot be served", f"the logs are in {session}")
    assert session.is_dir()


@pytest.mark.parametrize("length", [1, 9, 60])
def test_the_paths_of_sockets_are_short_enough(folder: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """A unix socket has at most 107 bytes, HAProxy's 97; its node id has 56. /tmp is used if TMPDIR is too long."""
    long = folder / ("a" * length)
    long.mkdir()
    monkeypatch.delenv("RAY_TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with private_session() as session:
        assert len(f"{session}/session_2026-11-27_03-06-19_703697_4194304/sockets/plasma_store") <= 107
        haproxy = Path(os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent
        assert len(f"{haproxy}/{'f' * 56}/admin.sock") <= 97 and haproxy.stat().st_mode & 0o777 == 0o700
        assert session.parents[1] == (long if length == 1 else Path("/tmp"))
    assert not session.parent.exists() and not haproxy.exists()


@only_root
def test_a_tmpdir_whose_entries_others_can_replace_is_refused(folder: Path) -> None:
    folder.chmod(0o777)
    with pytest.raises(TrustError, match="another user could replace the folder for Ray's files"), private_session():
        pass
    assert list(folder.iterdir()) == []


def readable(path: Path) -> None:
    path.chmod(0o644)


def foreign(path: Path) -> None:
    os.chown(path, OTHER_USER, OTHER_USER)


def linked(path: Path) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to("target")


def in_shared_folder(path: Path) -> None:
    path.parent.chmod(0o777)


def missing(path: Path) -> None:
    path.unlink()


FAULTS: list[Any] = [
    (readable, r"can be read by other users \(mode 0644\)"),
    pytest.param(foreign, "belongs to the user id 12002", marks=only_root),
    (linked, "is not a regular file"),
    pytest.param(in_shared_folder, "is in a folder that other users can change", marks=only_root),
    (missing, "cannot be read: No such file or directory"),
]


@pytest.mark.parametrize(("spoil", "reason"), FAULTS)
def test_a_token_that_others_may_know_or_choose_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], reason: str
) -> None:
    path = folder / "token"
    path.write_text("0" * 64)
    path.chmod(0o600)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    assert token_problem(path) == ""
    spoil(path)
    with pytest.raises(TrustError, match=reason), private_session():
        pass


def test_ray_without_tokens_is_refused_before_it_starts(run_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(f"models:\n- serve: {TINY} --device cpu\n")
    done = run_cli("deploy", str(tmp_path / "models.yaml"), "--ray", RAY_AUTH_MODE="disabled")
    assert done.returncode == 4 and "error: RAY_AUTH_MODE=disabled lets every user" in done.stderr, done.stderr
    assert "hint: unset RAY_AUTH_MODE" in done.stderr


@only_root
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(foreign, "it belongs to another user, with the id 12002"), (linked, "it is a symbolic link")],
)
def test_auto_does_not_connect_to_an_address_that_another_user_has_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path], None], reason: str
) -> None:
    monkeypatch.setattr(ray_session, "_addresses_of_processes", lambda: iter(()))
    path = folder / "ray" / "ray_current_cluster"
    path.parent.mkdir()
    path.write_text("192.0.2.1:6379\n")
    assert own_cluster() == "192.0.2.1:6379"
    spoil(path)
    with pytest.raises(TrustError, match=f"ray_current_cluster cannot be used: {reason}"):
        own_cluster()


@pytest.mark.parametrize(
    ("last", "running", "address"),
    [
        ("192.0.2.1:6379", ["192.0.2.2:6379", "192.0.2.1:6379"], "192.0.2.1:6379"),
        ("192.0.2.1:6379", ["192.0.2.2:6379"], "192.0.2.2:6379"),  # the last one has ended
        ("192.0.2.1:6379", [], "192.0.2.1:6379"),  # its processes are in another container
        ("", ["192.0.2.2:6379"], "192.0.2.2:6379"),
        ("", [], ""),
    ],
)
def test_auto_connects_to_the_last_started_of_the_running_clusters(
    folder: Path, monkeypatch: pytest.MonkeyPatch, last: str, running: list[str], address: str
) -> None:
    monkeypatch.setattr(ray_session, "_addresses_of_processes", lambda: iter(running))
    if last:
        (folder / "ray").mkdir()
        (folder / "ray" / "ray_current_cluster").write_text(last)
    if address:
        assert own_cluster() == address
    else:
        with pytest.raises(UsageError, match="there is no Ray cluster of this user"):
            own_cluster()


def test_variables_are_as_before_afterwards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "")
    before = dict(os.environ)
    with private_session():
        assert os.environ["RAY_AUTH_TOKEN_PATH"]
    assert dict(os.environ) == before


@only_root
def test_auto_does_not_connect_to_the_address_of_a_process_of_another_user(folder: Path) -> None:
    """Ray itself takes `--gcs-address` of any process."""
    for uid, addresses in ((OTHER_USER, []), (0, ["192.0.2.1:6379"])):
        copy = f"import os; os.setuid({uid}); print(flush=True); os.read(0, 1)"
        command = ["raylet", "-c", copy, "--gcs-address=192.0.2.1:6379"]
        process = subprocess.Popen(command, executable=sys.executable, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        with process:
            assert process.stdin is not None and process.stdout is not None
            process.stdout.readline()
            found = list(ray_session._addresses_of_processes())
            process.stdin.close()
        assert found == addresses
