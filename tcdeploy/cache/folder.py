"""The cache folder: its layout, and how torch and Triton are pointed at it. Does not import torch.

    ROOT/                 TORCHINDUCTOR_CACHE_DIR: graphs, generated code, .so files, autotune winners
    ROOT/triton/          TRITON_CACHE_DIR
    ROOT/manifests/       one JSON file per plan (manifest.py)
    ROOT/toolchain/       recorded output of the C++ compiler (toolchain.py)
    ROOT/leases/          one lock file per plan, shared by the processes that run from it (leases.py)
    ROOT/bundles/         headers and signatures of unpacked bundles (bundle/)

`activate` must run before the first compilation, because torch reads the variables once. It writes a test file first,
because torch reports an unwritable folder as a bare OSError in the middle of a compilation. A read-only folder that
holds the plan (a container image, a read-only mount) is copied to a temporary folder that lives as long as the process.

TRITON_CACHE_DIR and TRITON_CACHE_MANAGER are overwritten when they are set: a cache that is packed and moved must be a
single folder, and Triton's own manager stores absolute paths (torch_compat/triton_cache.py).
"""

from __future__ import annotations

import atexit
import errno
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from tcdeploy.cache.contents import TRITON_DIR, is_cache_file, list_cache_files
from tcdeploy.cache.manifest import MANIFESTS_DIR, manifest_path
from tcdeploy.errors import SpaceError, TcdeployError

MEBIBYTE = 1 << 20
BUNDLES_DIR, HEADER_SUFFIX = "bundles", ".head"  # an unpacked bundle leaves its header with the signatures


def activate(root: str, plan_key: str, num_buckets: int) -> str:
    """Create the folder, check that it is writable, and point torch and Triton at it.

    Returns the folder in use: `root`, or a private copy if `root` holds the plan and is not writable. Raises SpaceError
    and TcdeployError.
    """
    try:
        folder = _ensure_writable(root)
        _check_free_space(folder, num_buckets)
    except TcdeployError:
        if not manifest_path(root, plan_key).is_file():
            raise
        folder = _private_copy(root)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.realpath(folder)
    os.environ["TRITON_CACHE_DIR"] = os.path.join(os.path.realpath(folder), TRITON_DIR)
    from tcdeploy.torch_compat.triton_cache import use_relocatable_cache  # imports Triton

    use_relocatable_cache()
    _pin_ptxas()
    return folder


def bytes_needed(num_buckets: int) -> int:
    """A generous bound for a cold warm-up: four buckets of builtin:tiny take 6 MiB on a CPU."""
    return (4 + 4 * num_buckets) * MEBIBYTE


def folder_error(root: str, error: OSError) -> TcdeployError:
    """The error of this package for an OSError that was raised while writing to the cache folder."""
    hint = "choose a writable folder: --cache-dir DIR, or TCDEPLOY_CACHE_DIR=DIR"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SpaceError(f"the disk of the cache folder {root} is full", "free space, or choose another --cache-dir")
    if error.errno == errno.EROFS:
        return TcdeployError(f"the cache folder {root} is on a read-only file system", hint)
    return TcdeployError(f"the cache folder {root} cannot be written: {error.strerror}", hint)


def _pin_ptxas() -> None:
    """Use the ptxas of torch's wheel, if it has one, for all kernels (torch 2.11 has 13.0, its Triton 12.8).

    ptxas' version is part of every kernel's key. Inductor's compile workers use torch's ptxas, and so does this process
    after the first kernel that Inductor compiles in it; kernels compiled before that would get another key.
    """
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        ptxas = Path(torch.origin).parent / "bin" / "ptxas"
        if os.access(ptxas, os.X_OK):
            os.environ.setdefault("TRITON_PTXAS_PATH", str(ptxas))


def _ensure_writable(root: str) -> str:
    path = Path(root)
    try:
        for folder in (TRITON_DIR, MANIFESTS_DIR):
            (path / folder).mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".writable-") as test_file:
            test_file.write(b"x" * 4096)
            test_file.flush()
    except OSError as error:
        raise folder_error(root, error) from error
    return root


def _check_free_space(root: str, num_buckets: int) -> None:
    """Only for a folder without programs: a filled one may need no more space."""
    free = shutil.disk_usage(root).free
    if free < bytes_needed(num_buckets) and not any(Path(root).glob("fxgraph/*")):
        raise SpaceError(
            f"the cache folder {root} has {free / MEBIBYTE:.1f} MiB free, and {num_buckets} buckets may need "
            f"{bytes_needed(num_buckets) / MEBIBYTE:.0f} MiB",
            "free space, or choose another folder: --cache-dir DIR",
        )


def _private_copy(root: str) -> str:
    """Copy manifests and cache files to a temporary folder, which is deleted when the process exits."""
    try:
        copy = tempfile.mkdtemp(prefix="tcdeploy-cache-")
        atexit.register(shutil.rmtree, copy, ignore_errors=True)
        shutil.copytree(root, copy, dirs_exist_ok=True, copy_function=shutil.copyfile, ignore=_ignore_bookkeeping(root))
        for folder, _, _ in os.walk(copy):
            os.chmod(folder, 0o700)  # copytree copies the mode of the read-only folder
    except OSError as error:
        reason = error.args[0][0][2] if isinstance(error, shutil.Error) else error  # (source, target, reason) per file
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(reason):
            size = sum(Path(root, path).stat().st_size for path in list_cache_files(root))
            raise SpaceError(
                f"the cache folder {root} cannot be written, and {tempfile.gettempdir()} has no room for a private "
                f"copy of {size} bytes",
                "set TMPDIR to a folder with more free space, or choose a writable --cache-dir",
            ) from error
        raise TcdeployError(
            f"the cache folder {root} cannot be written, and no private copy can be made: {reason}",
            "set TMPDIR to a writable folder, or choose another --cache-dir",
        ) from error
    return copy


def _ignore_bookkeeping(root: str) -> Callable[[str, list[str]], list[str]]:
    """The `ignore` argument of copytree: everything but manifests and cache files."""

    def ignored(folder: str, names: list[str]) -> list[str]:
        relative = Path(folder).relative_to(root)
        # is_cache_file takes files only, so a folder is tested with the name of a file in it.
        paths = {name: relative / name / "x" if Path(folder, name).is_dir() else relative / name for name in names}
        return [
            name
            for name, path in paths.items()
            if path.parts[0] != MANIFESTS_DIR and not is_cache_file(path.as_posix())
        ]

    return ignored
