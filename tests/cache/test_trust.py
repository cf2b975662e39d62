"""Cache folders that another user could change are refused. With real user ids: these tests need root."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.bundle.unpack import unpack
from tcdeploy.cache.folder import access as folder_module
from tcdeploy.cache.folder.access import check_folder, create_folder
from tcdeploy.cache.staging.activate import activate
from tcdeploy.cache.trust.ownership import check_contents, check_ownership, make_private_folder
from tcdeploy.errors import TcdeployError, TrustError
from tests.bundle.conftest import Keys, Packed

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
        assert "--trust-cache-dir" in message and f"mv {folder} {folder}.untrusted" in message
        assert "chown" not in message and "chmod" not in message, "they would make the other user's files ours"
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
@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_link_that_another_user_could_replace_is_refused(shared: Path, mode: int) -> None:
    """The folder that it leads to is the victim's; the attacker would replace the link after the check."""
    open_folder, target = folder_of(0, shared / "open", mode), folder_of(OWNER, shared / "target")
    os.chown(open_folder, 0, OTHER)
    for owner in (OTHER, OWNER):
        link = open_folder / f"link-{owner}"
        link.symlink_to(target)
        os.lchown(link, owner, owner)
        message = as_user(OWNER, lambda link=link: check_folder(link))
        assert f"the path of the cache folder {link} leads through {open_folder}, which can be changed by" in message
        assert as_user(OWNER, lambda link=link: check_folder(link, is_trusted=True)) == ""


@needs_root
def test_a_link_of_another_user_in_a_sticky_folder_is_refused(shared: Path) -> None:
    """Its owner may replace it."""
    target = folder_of(OWNER, shared / "target")
    (shared / "link").symlink_to(target)
    for path in (shared / "link", shared / "link" / "new"):
        for owner in (OWNER, 0):
            os.lchown(shared / "link", owner, owner)
            assert as_user(OWNER, lambda path=path: check_folder(path)) == ""
        os.lchown(shared / "link", OTHER, OTHER)
        message = as_user(OWNER, lambda path=path: check_folder(path))
        assert f"leads through {shared / 'link'}, which belongs to the user {OTHER}" in message


@needs_root
def test_each_folder_of_a_chain_of_links_is_checked(shared: Path) -> None:
    """private/first -> ../open/second -> the victim's folder; then with `open` safe; then with a path with `..`."""
    private, open_folder = folder_of(OWNER, shared / "private"), folder_of(OWNER, shared / "open", 0o777)
    target = folder_of(OWNER, private / "cache")
    (private / "first").symlink_to("../open/second")
    (open_folder / "second").symlink_to(target)
    for path in (private / "first", open_folder / "second", open_folder / ".." / "private" / "cache"):
        open_folder.chmod(0o777)
        assert f"leads through {open_folder}, which can be" in as_user(OWNER, lambda path=path: check_ownership(path))
        open_folder.chmod(0o755)
        assert as_user(OWNER, lambda path=path: check_ownership(path)) == ""


@needs_root
def test_a_sticky_folder_in_a_folder_that_others_can_write_is_refused(shared: Path) -> None:
    """Another user could replace the sticky folder, and with it the cache folder."""
    outer = folder_of(0, shared / "outer", 0o777)
    mine = folder_of(OWNER, folder_of(0, outer / "tmp", 0o1777) / "mine")
    assert f"is in {outer}, which can be changed by every user" in as_user(OWNER, lambda: check_folder(mine))


@needs_root
def test_a_sticky_folder_itself_is_refused_however_it_is_named(shared: Path) -> None:
    mine = folder_of(OWNER, shared / "mine")
    (mine / "link").symlink_to(shared)
    for path in (shared, mine / "..", mine / "link", mine / "link" / "."):
        message = as_user(OWNER, lambda path=path: check_ownership(path))
        assert f"the cache folder {shared} can be changed by every user" in message


def test_a_relative_path_is_checked_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "cache").mkdir()
    monkeypatch.chdir(tmp_path / "open")
    with pytest.raises(TrustError, match=f"is in {tmp_path / 'open'}, which can be changed by every user"):
        check_ownership("new")
    monkeypatch.chdir(tmp_path)
    check_ownership("cache")


def test_a_path_that_cannot_be_followed_is_an_error_with_the_path(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(TcdeployError, match=f"{tmp_path / 'loop'} .*Too many levels of symbolic links"):
        check_folder(tmp_path / "loop")


def add_before_mkdir(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let another user create `folder` just before this process does."""
    mkdir = os.mkdir

    def mkdir_after_the_attacker(path: Path | str, *arguments: Any, **options: Any) -> None:
        if Path(path) == folder and not folder.exists():
            mkdir(folder)
            os.chown(folder, OTHER, OTHER)
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", mkdir_after_the_attacker)


@needs_root
def test_a_folder_that_another_user_creates_after_the_check_is_refused(
    shared: Path, small: Packed, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared / "x"
    add_before_mkdir(monkeypatch, folder)
    with pytest.raises(TrustError, match=f"the cache folder {folder} belongs to the user {OTHER}"):
        activate(str(folder), "0123456789abcdef", 1)
    shutil.rmtree(folder)
    with pytest.raises(TrustError, match=f"the cache folder {folder} belongs to the user {OTHER}"):
        unpack(small.bundle, folder, keys.trusted)
    assert list(folder.iterdir()) == []


@needs_root
@pytest.mark.parametrize("is_parent", [False, True])
def test_a_folder_that_another_user_removes_before_the_second_check_is_refused(
    shared: Path, monkeypatch: pytest.MonkeyPatch, is_parent: bool
) -> None:
    """It would be back after the check."""
    folder = shared / "parent" / "x" if is_parent else shared / "x"
    attacked = folder.parent if is_parent else folder
    add_before_mkdir(monkeypatch, attacked)
    make = folder_module.make_private_folder

    def make_and_remove(path: Path) -> None:
        make(path)
        shutil.rmtree(attacked)

    monkeypatch.setattr(folder_module, "make_private_folder", make_and_remove)
    with pytest.raises(TrustError, match=f"the cache folder {folder} was removed by another process"):
        create_folder(folder)


@needs_root
@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_manifests_of_another_user_are_refused_in_every_folder(shared: Path, mode: int) -> None:
    """Their owner may have them open, or have other links to them."""
    folder = folder_of(0, shared / "cache", mode)
    manifest = folder_of(0, folder / "manifests") / "0123456789abcdef.json"
    manifest.write_text("{}")
    check_folder(folder)
    for path in (manifest, manifest.parent):
        os.chown(path, OTHER, OTHER)
        with pytest.raises(TrustError, match=f"{path} in the cache folder belongs to the user {OTHER}"):
            check_folder(folder)
        os.chown(path, 0, 0)


@needs_root
def test_the_contents_of_another_user_s_private_folder_are_refused(shared: Path) -> None:
    """root can read it."""
    folder = folder_of(OTHER, shared / "cache")
    folder_of(OTHER, folder / "fxgraph")
    with pytest.raises(TrustError, match=f"{folder / 'fxgraph'} in the cache folder belongs to the user {OTHER}"):
        check_contents(folder, ["fxgraph"])


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
