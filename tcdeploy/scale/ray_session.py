"""Keeps other users of the machine out of the Ray that `tcdeploy deploy` starts, and finds a cluster of this user.

Ray's defaults are made for machines with one user: the token that lets a client run code is in ~/.ray/auth_token, which
everyone can read (umask 022); the folders of a session, with the sockets of its processes, have mode 0777; and HAProxy
accepts commands from everyone, at a socket in /tmp/haproxy-serve. Here each start has a new folder of mode 0700 for all
of these, and a new token. `ray.init(address="auto")` connects to a process of any user, so this module looks up the
address of a cluster of this user or root.

Does not import Ray: the variables must be set before `ray.init`. What Ray's ports accept: docs/security.md.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tcdeploy.cache.trust.ownership import check_ownership
from tcdeploy.errors import TcdeployError, TrustError, UsageError
from tcdeploy.host.regular_file import open_regular

PRIVATE_UMASK = 0o077
PREFIX = "tcdeploy-ray-"
# Limits of paths of unix sockets: HAProxy's are at FOLDER/NODE_ID/admin.sock, and Ray's in the folder of a session.
MAX_HAPROXY_FOLDER_BYTES = 97 - len(f"/{'f' * 56}/admin.sock")
MAX_FOLDER_BYTES = 107 - len("/r/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
RANDOM_BYTES = 8  # of a name of `mkdtemp`
MODE_VARIABLE, TOKEN_VARIABLE, TOKEN_PATH_VARIABLE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
ADDRESS_VARIABLE, FOLDER_VARIABLE = "RAY_ADDRESS", "RAY_TMPDIR"
HAPROXY_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "admin.sock",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "metrics.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
}
VARIABLES = {*HAPROXY_FILES, TOKEN_PATH_VARIABLE}
MAX_ADDRESS_BYTES = 256
SHARED = stat.S_IRWXG | stat.S_IRWXO
log = logging.getLogger("tcdeploy.scale")


@contextlib.contextmanager
def private_session() -> Iterator[Path]:
    """Create a private folder, and set the variables and the umask of the Ray that is started in the block.

    Yields the folder for the sessions (`_temp_dir` of `ray.init`), which Ray makes accessible to all users: it is in
    the private one. At the end both are deleted, unless the hint of an error names them. Raises TrustError.
    """
    _check_authentication(os.environ)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(_private_folder(MAX_FOLDER_BYTES))
        haproxy = folder
        if len(os.fsencode(folder)) > MAX_HAPROXY_FOLDER_BYTES:
            haproxy = stack.enter_context(_private_folder(MAX_HAPROXY_FOLDER_BYTES))
        stack.callback(os.umask, os.umask(PRIVATE_UMASK))
        before = dict(os.environ)
        os.environ.update(_variables(folder, haproxy, before))
        try:
            yield folder / "r"
        finally:
            for name in VARIABLES:
                if name in before:
                    os.environ[name] = before[name]
                else:
                    os.environ.pop(name, None)


def _variables(folder: Path, haproxy: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Those that Ray's processes inherit, without those that the user has set. Writes the token. Raises OSError."""
    variables = {name: str(haproxy / file) for name, file in HAPROXY_FILES.items() if name not in environ}
    if not environ.get(TOKEN_VARIABLE) and not environ.get(TOKEN_PATH_VARIABLE):
        path = folder / "auth_token"
        path.write_text(secrets.token_hex(32))
        variables[TOKEN_PATH_VARIABLE] = str(path)
    return variables


def _check_authentication(environ: Mapping[str, str]) -> None:
    """Raises TrustError if other users could run code in the Ray that is started with these variables."""
    mode = environ.get(MODE_VARIABLE, "token")
    if mode.lower() != "token":
        raise TrustError(
            f"{MODE_VARIABLE}={mode} lets every user who can connect to Ray's ports run code",
            f"unset {MODE_VARIABLE}; a cluster without tokens can only be used with --address",
        )
    path = environ.get(TOKEN_PATH_VARIABLE)
    if path and not environ.get(TOKEN_VARIABLE) and (reason := token_problem(Path(path))):
        raise TrustError(
            f"{path} ({TOKEN_PATH_VARIABLE}) {reason}, and everyone who knows Ray's token can run code",
            f"unset {TOKEN_PATH_VARIABLE}, so that each deployment has a new token; or write a new one: "
            f"(umask 077; openssl rand -hex 32 > FILE)",
        )


def token_problem(path: Path) -> str:
    """Why other users may know or choose the token in a file; empty if they cannot."""
    try:
        status = path.lstat()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to the user id {status.st_uid}"
    if status.st_mode & SHARED:
        return f"can be read by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    try:
        check_ownership(path.parent)
    except TrustError:
        return "is in a folder that other users can change"
    return ""


def warn_of_shared_token() -> None:
    """Warn if other users may know the token of the cluster that the command connects to."""
    path = Path(os.environ.get(TOKEN_PATH_VARIABLE) or Path.home() / ".ray" / "auth_token")
    if path.exists() and not os.environ.get(TOKEN_VARIABLE) and (reason := token_problem(path)):
        log.warning(
            "%s %s: everyone who knows the token can run code on the cluster; write a new one with `umask 077`, and "
            "start the cluster again",
            path, reason,
        )  # fmt: skip


@contextlib.contextmanager
def _private_folder(max_bytes: int) -> Iterator[Path]:
    """A new folder of mode 0700 below RAY_TMPDIR, TMPDIR or /tmp, with a path of at most `max_bytes`."""
    folder = _create_folder(max_bytes)
    is_needed = False
    try:
        yield folder
    except TcdeployError as error:
        is_needed = str(folder) in error.hint
        raise
    finally:
        if not is_needed:
            shutil.rmtree(folder, ignore_errors=True)


def _create_folder(max_bytes: int) -> Path:
    """Raises UsageError, and TrustError if another user could replace it."""
    wanted, name_bytes = os.environ.get(FOLDER_VARIABLE) or tempfile.gettempdir(), len(PREFIX) + RANDOM_BYTES + 1
    fits = len(os.fsencode(wanted)) + name_bytes <= max_bytes
    if not fits and max_bytes == MAX_FOLDER_BYTES and os.environ.get(FOLDER_VARIABLE):
        log.warning(
            "%s=%s is too long for the paths of Ray's sockets (at most %d bytes); using /tmp",
            FOLDER_VARIABLE, wanted, max_bytes - name_bytes,
        )  # fmt: skip
    root = wanted if fits else "/tmp"
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    except OSError as error:
        raise UsageError(
            f"the folder for Ray's files cannot be created in {root}: {error.strerror}",
            f"choose another folder: {FOLDER_VARIABLE}=DIR",
        ) from error
    try:
        check_ownership(folder)
    except TrustError as error:
        folder.rmdir()
        raise TrustError(
            f"another user could replace the folder for Ray's files, because others can change {root} or a folder "
            "above it",
            f"choose a folder that only you can change, or one that is sticky: {FOLDER_VARIABLE}=/tmp",
        ) from error
    return folder


def own_cluster() -> str:
    """The address of the cluster that this user or root has started on this machine.

    Of several, that in Ray's file: the last one started. The file may name a cluster that has ended.
    Raises TrustError if another user has written the file, and UsageError if there is no cluster.
    """
    path = Path(os.environ.get(FOLDER_VARIABLE) or os.environ.get("TMPDIR") or "/tmp") / "ray" / "ray_current_cluster"
    last, running = _read_address(path), list(_addresses_of_processes())
    address = last if last in running or not running else running[0]
    if not address:
        raise UsageError(
            "there is no Ray cluster of this user on this machine (--address auto)",
            "`ray start --head` starts one; --address HOST:PORT connects to one of another user",
        )
    return address


def _read_address(path: Path) -> str:
    """Empty if the file does not exist. Raises TrustError."""
    try:
        with open_regular(path, must_own=True) as file:
            return file.read(MAX_ADDRESS_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise TrustError(
            f"{path} cannot be used: {error.strerror}, and a cluster runs code in every process that connects to it",
            "name a cluster that you trust: --address HOST:PORT",
        ) from error


def _addresses_of_processes() -> Iterator[str]:
    """The clusters of Ray's node processes (raylet) of this user and root."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid in (0, os.geteuid()):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if os.path.basename(words[0]) == b"raylet":
                    flag = b"--gcs-address="
                    yield from (word.removeprefix(flag).decode() for word in words if word.startswith(flag))
