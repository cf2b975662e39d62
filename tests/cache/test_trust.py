"""Cache folders that another user could change are refused. With real user ids: these tests need root."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tcdeploy.cache.folder import check_folder
from tcdeploy.cache.trust import check_ownership, make_private_folder
from tcdeploy.errors import TrustError

OWNER, OTHER = 12001, 12002  # user ids without accounts
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as several users")


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp: of root, sticky, writable by everybody."""
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        folder = Path(parent, "tmp")
        folder.mkdir()
        folder.chmod(0o1777)
        yield folder


def as_user(uid: int, action: Callable[[], None]) -> str:
    """Run in a child process with this user id; returns its TrustError, or an empty string."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([]), os.setgid(uid), os.setuid(uid)
            try:
                action()
            except TrustError as error:
                os.write(writer, f"{error.message}\n{error.hint}".encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        message = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return message


def folder_of(uid: int, path: Path, mode: int = 0o700) -> Path:
    path.mkdir()
    os.chown(path, uid, uid)
    path.chmod(mode)
    return path


@needs_root
def test_a_folder_that_another_user_made_first_is_refused(shared: Path) -> None:
    """The attack: a shared TMPDIR, and a folder whose name is known beforehand."""
    folder = folder_of(OTHER, shared / "torchinductor_someone", 0o755)
    for uid in (OWNER, 0):
        message = as_user(uid, lambda: check_folder(folder))
        assert f"the cache folder {folder} belongs to the user {OTHER}" in message
        assert "--trust-cache-dir" in message and "chown -R" in message
        assert as_user(uid, lambda: check_folder(folder, is_trusted=True)) == ""
    assert as_user(OTHER, lambda: check_folder(folder)) == ""


@needs_root
def test_a_folder_inside_one_of_another_user_is_refused(shared: Path) -> None:
    outer = folder_of(OTHER, shared / "outer", 0o777)
    inner = folder_of(OWNER, outer / "inner")
    message = as_user(OWNER, lambda: check_folder(inner))
    assert f"the cache folder {inner} is in {outer}, which belongs to the user {OTHER}" in message
    missing = outer / "not" / "yet"
    assert f"is in {outer}, which" in as_user(OWNER, lambda: check_folder(missing))


@needs_root
def test_a_sticky_folder_of_another_user_is_refused(shared: Path) -> None:
    """Its owner may rename the folders in it."""
    sticky = folder_of(OTHER, shared / "sticky", 0o1777)
    assert "belongs to the user" in as_user(OWNER, lambda: check_folder(folder_of(OWNER, sticky / "mine")))


@needs_root
def test_folders_of_root_and_of_this_user_are_accepted(shared: Path) -> None:
    mine, baked = folder_of(OWNER, shared / "mine", 0o755), folder_of(0, shared / "baked-into-an-image", 0o755)
    assert as_user(OWNER, lambda: check_folder(mine / "new")) == ""
    assert as_user(OWNER, lambda: check_folder(baked)) == ""


@needs_root
def test_a_link_to_a_folder_of_another_user_is_refused(shared: Path) -> None:
    theirs = folder_of(OTHER, shared / "theirs")
    (shared / "link").symlink_to(theirs)
    assert f"the cache folder {theirs} belongs to the user" in as_user(OWNER, lambda: check_ownership(shared / "link"))


@needs_root
@pytest.mark.parametrize("name", ["manifests", "manifests/0123456789abcdef.json"])
def test_writable_manifests_in_a_folder_that_others_can_enter_are_refused(shared: Path, name: str) -> None:
    folder = folder_of(OWNER, shared / "cache", 0o755)
    manifest = folder_of(OWNER, folder / "manifests", 0o755) / "0123456789abcdef.json"
    manifest.write_text("{}")
    os.chown(manifest, OWNER, OWNER)
    assert as_user(OWNER, lambda: check_folder(folder)) == ""
    (folder / name).chmod(0o777)
    message = as_user(OWNER, lambda: check_folder(folder))
    assert f"{folder / name} in the cache folder can be changed by every user" in message
    folder.chmod(0o700)
    assert as_user(OWNER, lambda: check_folder(folder)) == "", "nobody else can enter it"


@pytest.mark.parametrize(
    ("mode", "reason"), [(0o777, "by every user"), (0o1777, "by every user"), (0o775, "by the group")]
)
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int, reason: str) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, 0, 12003)
    elif mode == 0o775:
        pytest.skip("only root can give a folder to a group without an account")
    folder.chmod(mode)
    with pytest.raises(TrustError, match=f"the cache folder {folder} can be changed {reason}") as caught:
        check_ownership(folder)
    assert caught.value.exit_code == 4


def test_the_private_group_of_the_owner_may_write(tmp_path: Path) -> None:
    """With umask 002, the default of several distributions, folders have mode 0775."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o775)
    check_ownership(tmp_path / "cache")


@pytest.mark.parametrize("name", ["manifests", "triton", "bundles", ".lock", "leases", "precompiled_headers"])
def test_a_symbolic_link_inside_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    make_private_folder(tmp_path / "cache")
    (tmp_path / "cache" / name).symlink_to(tmp_path / "elsewhere")
    for is_trusted in (False, True):
        with pytest.raises(TrustError, match=f"{tmp_path / 'cache' / name} is a symbolic link"):
            check_folder(tmp_path / "cache", is_trusted)


def test_new_folders_are_private(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        make_private_folder(tmp_path / "a" / "b")
    finally:
        os.umask(umask)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b")] == [0o700, 0o700]
