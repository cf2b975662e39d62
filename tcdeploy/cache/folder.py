"""One folder that holds every compiled thing: Inductor's files in it, Triton's and our manifests below it.

    ROOT/                 TORCHINDUCTOR_CACHE_DIR: graphs, generated code, .so files, autotune winners
    ROOT/triton/          TRITON_CACHE_DIR
    ROOT/manifests/       one JSON per plan (manifest.py)
    ROOT/toolchain/       what the C++ compiler answers that made them (toolchain.py)
    ROOT/leases/          one lock per plan, held by every process that runs from it
    ROOT/bundles/         what was unpacked here, with its signatures (bundle/)

`activate` must run before the first compile, because torch reads the variables once. It proves by writing that the
folder can be written, since torch would raise a bare OSError 30 from deep inside. One that cannot (an image's, a
read-only mount) and holds the plan is copied to a folder of this process for as long as it lives. TRITON_CACHE_DIR and
TRITON_CACHE_MANAGER, where they were set, give way: a cache that travels must be one folder, and without its own place
in it (kernel_cache.py, winners.py).
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tcdeploy.cache.contents import find_damage, is_cache_file
from tcdeploy.cache.manifest import MANIFESTS_DIR, Manifest, manifest_path, read_manifest, read_manifests
from tcdeploy.errors import IntegrityError, SpaceError, TcdeployError

MEBIBYTE = 1 << 20
LEASES_DIR, LOCK_FILE = "leases", ".lock"
BUNDLES_DIR, HEADER_SUFFIX = "bundles", ".head"  # what stays of an unpacked bundle: its header and signatures
KEYED_DIRS = ("fxgraph/", "aotautograd/")  # of torch's: a folder per key, an entry per set of guards
LOCK_TIMEOUT_S = 600.0  # that a process waits for another one's unpacking or clearing
_leases: dict[Path, IO[bytes]] = {}


def activate(root: str, plan_key: str, buckets: int) -> str:
    """Make the folder, prove that it can be written, and point torch at it.

    Returns the folder in use: `root`, or a private copy where that holds the plan and cannot be written. Raises
    SpaceError or TcdeployError.
    """
    try:
        folder = _ensure_writable(root)
        _check_free_space(folder, buckets)
    except TcdeployError:
        if not manifest_path(root, plan_key).is_file():
            raise
        folder = _private_copy(root)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.realpath(folder)
    os.environ["TRITON_CACHE_DIR"] = os.path.join(os.path.realpath(folder), "triton")
    from tcdeploy.torch_compat.triton_cache import use_relocatable_cache  # imports Triton

    use_relocatable_cache()
    _pin_ptxas()
    return folder


def _pin_ptxas() -> None:
    """One ptxas for all kernels: torch's own, if its wheel brings one (13.0 in torch 2.11, where Triton's is 12.8).

    Inductor's workers take it, and so does this process from the first kernel on that Inductor compiles here; what was
    compiled before has Triton's. Its version is in the key of every kernel: they were not found again.
    """
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        ptxas = Path(torch.origin).parent / "bin" / "ptxas"
        if os.access(ptxas, os.X_OK):
            os.environ.setdefault("TRITON_PTXAS_PATH", str(ptxas))


def _ensure_writable(root: str) -> str:
    path = Path(root)
    try:
        for folder in ("triton", "manifests"):
            (path / folder).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".writable-") as probe:
            probe.write(b"x" * 4096)
            probe.flush()
    except OSError as error:
        raise _translate_error(root, error) from error
    return root


def _private_copy(root: str) -> str:
    """Of what a start needs, in the folder for temporary files; it goes when the process ends."""
    try:
        copy = tempfile.mkdtemp(prefix="tcdeploy-cache-")
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        shutil.copytree(root, copy, dirs_exist_ok=True, copy_function=shutil.copyfile, ignore=_ignore_bookkeeping(root))
        for folder, _, _ in os.walk(copy):
            os.chmod(folder, 0o700)  # copytree gives a folder the mode of the one that cannot be written
    except OSError as error:
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error  # (source, target, reason) of each
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(reason):
            size = sum(Path(root, path).stat().st_size for path in list_cache_files(root))
            raise SpaceError(
                f"the cache folder {root} cannot be written, and {tempfile.gettempdir()} has no room for a private "
                f"copy of {size} bytes",
                "give the process a folder for temporary files with more room: TMPDIR",
            ) from error
        raise TcdeployError(
            f"the cache folder {root} cannot be written, and no private copy can be made: {reason}",
            "give the process a folder for temporary files that can be written (TMPDIR), or another --cache-dir",
        ) from error
    return copy


def _ignore_bookkeeping(root: str) -> Callable[[str, list[str]], list[str]]:
    """For copytree: what a copy leaves behind, manifests not among it."""

    def ignored(folder: str, names: list[str]) -> list[str]:
        inside = Path(folder).relative_to(root)
        paths = {name: (inside / name / "x" if (Path(folder) / name).is_dir() else inside / name) for name in names}
        return [
            name
            for name, path in paths.items()
            if path.parts[0] != MANIFESTS_DIR and not is_cache_file(path.as_posix())
        ]

    return ignored


def acquire_lease(folder: str, plan_key: str) -> None:
    """Tell others, for as long as this process lives, that it runs from this plan's files.

    Whoever removes files holds the folder's lock while it asks and removes, so this waits for it.
    """
    path = Path(folder) / LEASES_DIR / plan_key
    if path in _leases:
        return
    with folder_lock(folder):
        try:
            path.parent.mkdir(exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)  # another user's lease can be shared too
        except OSError as error:
            raise _translate_error(folder, error) from error
        _leases[path] = os.fdopen(descriptor, "rb")  # closed by the end of the process, kill -9 included
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def is_leased(folder: str | Path, plan_key: str) -> bool:
    """Whether any process, this one too, runs from the plan's files. Writes nothing: the folder may be read-only."""
    try:
        with open(Path(folder) / LEASES_DIR / plan_key, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@contextmanager
def folder_lock(folder: str | Path) -> Iterator[None]:
    """Be the only one who adds to or removes from the folder as a whole.

    Raises TcdeployError after LOCK_TIMEOUT_S, and for a folder that cannot be written.
    """
    try:
        lock = open(Path(folder) / LOCK_FILE, "ab")  # noqa: SIM115 - closed below
    except OSError as error:
        raise _translate_error(str(folder), error) from error
    with lock as file:
        end = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TcdeployError(
                        f"another process has held the cache folder {folder} for {LOCK_TIMEOUT_S:.0f} s", "try again"
                    ) from None
                time.sleep(0.05)
        yield


def read_verified_manifest(
    folder: str, plan_key: str, rebuild: bool, display_path: str | None = None
) -> Manifest | None:
    """The plan's manifest, with every file that it names found as it was; None where there is none.

    Raises IntegrityError naming what was damaged, or, with `rebuild`, discards the plan's files and returns None.
    A folder that knows other plans only has theirs checked: programs are shared. `display_path` is the folder's name in the
    error, where `folder` is a private copy of it.
    """
    try:
        manifest = read_manifest(manifest_path(folder, plan_key))
        checked = [manifest] if manifest else read_manifests(folder).values()
        files = {file.path: file for one in checked for file in one.files}
        damage = find_damage(folder, files.values())
    except IntegrityError:
        if not rebuild:
            raise
        discard_plan(folder, plan_key)
        return None
    if not damage:
        if manifest:
            _remove_unlisted_files(folder, manifest)
        return manifest
    if rebuild:
        discard_plan(folder, plan_key)
        return None
    more = f", and {len(damage) - 1} more files are damaged" if len(damage) > 1 else ""
    raise IntegrityError(
        f"the cache is damaged: {Path(display_path or folder) / damage[0].path} {damage[0].reason}{more}",
        "nothing of it was loaded; --on-bad-cache rebuild discards it and compiles again",
    )


def unlisted_files(folder: str | Path, manifest: Manifest) -> set[Path]:
    """Entries beside those that the plan names, under the same key, which no manifest of the folder names.

    torch unpickles what lies in the folder of a key, one file after another, until one fits: what nobody checked must
    not lie there. It passes over names that begin with a dot: files that another process is writing.
    """
    entries = {Path(folder, file.path) for file in manifest.files if file.path.startswith(KEYED_DIRS)}
    beside = {path for parent in {entry.parent for entry in entries} for path in parent.iterdir()} - entries
    if not beside:
        return set()
    known = read_manifests(folder, skip_damaged=True).values()
    named = {Path(folder, file.path) for one in known for file in one.files}
    unnamed = (path for path in beside - named if not path.name.startswith("."))
    return {path for path in unnamed if path.is_file() or path.is_symlink()}


def _remove_unlisted_files(folder: str, manifest: Manifest) -> None:
    """Two cold starts at once leave such files too, and lose nothing."""
    if unlisted_files(folder, manifest):
        with folder_lock(folder):  # one that unpacks has put files in place that its manifest was yet to name
            for path in unlisted_files(folder, manifest):
                path.unlink(missing_ok=True)


def discard_plan(folder: str, plan_key: str) -> None:
    """Remove the plan's manifest, and every compiled file but those that another plan's manifest vouches for."""
    with folder_lock(folder):
        manifest_path(folder, plan_key).unlink(missing_ok=True)
        Path(folder, BUNDLES_DIR, f"{plan_key}{HEADER_SUFFIX}").unlink(missing_ok=True)
        paths = list(Path(folder, MANIFESTS_DIR).glob("*.json"))  # first: what is written from now on is none of them
        others = read_manifests(folder, skip_damaged=True)
        for path in paths:
            if path.stem not in others:  # damaged, or of another version: what it named goes too
                path.unlink(missing_ok=True)
                Path(folder, BUNDLES_DIR, f"{path.stem}{HEADER_SUFFIX}").unlink(missing_ok=True)
        vouched = {file for one in others.values() for file in one.files}
        kept = {file.path for file in vouched} - {damage.path for damage in find_damage(folder, vouched)}
        for name in list_cache_files(folder):
            if name not in kept:
                Path(folder, name).unlink(missing_ok=True)


def list_cache_files(folder: str | Path) -> list[str]:
    """Every file that a start could need, relative to the folder, sorted."""
    root = Path(folder)
    paths = (Path(parent, name).relative_to(root).as_posix() for parent, _, names in os.walk(root) for name in names)
    return sorted(path for path in paths if is_cache_file(path))


def bytes_needed(buckets: int) -> int:
    """Room that a cold warm-up may take, generous: four buckets of the tiny model on a CPU took 6 MiB."""
    return (4 + 4 * buckets) * MEBIBYTE


def _check_free_space(root: str, buckets: int) -> None:
    """Only of an empty folder: what is in a filled one was paid for."""
    free = shutil.disk_usage(root).free
    if free < bytes_needed(buckets) and not any(Path(root).glob("fxgraph/*")):
        raise SpaceError(
            f"the cache folder {root} has {free / MEBIBYTE:.1f} MiB free, and {buckets} buckets may need "
            f"{bytes_needed(buckets) / MEBIBYTE:.0f} MiB",
            "free some room, or name another folder: --cache-dir",
        )


def _translate_error(root: str, error: OSError) -> TcdeployError:
    hint = "name a folder that can be written: --cache-dir, or TCDEPLOY_CACHE_DIR"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SpaceError(f"the disk of the cache folder {root} is full", "free some room, or name another --cache-dir")
    if error.errno == errno.EROFS:
        return TcdeployError(f"the cache folder {root} is on a read-only file system", hint)
    return TcdeployError(f"the cache folder {root} cannot be written: {error.strerror}", hint)
