"""The cache folder: its layout, and how a start uses it. Does not import torch.

    ROOT/                      files of torch: graphs, generated code, .so files, autotune winners
    ROOT/triton/               files of Triton
    ROOT/manifests/            one JSON file per plan (manifest.py)
    ROOT/toolchain/            recorded output of the C++ compiler (toolchain.py)
    ROOT/conflicts/            files whose path another plan uses for different content (contents.py)
    ROOT/bundles/              headers and signatures of unpacked bundles (bundle/)
    ROOT/leases/               one lock file per plan, shared by the processes that run from it (leases.py)
    ROOT/precompiled_headers/  precompiled C++ headers, shared by starts that compile; not packed into bundles
    ROOT/.start-XXXX/          the staging folder of a start (staging.py)
    ROOT/.staging-XXXX/        files of a bundle that is being unpacked (bundle/unpack.py)

`activate` must run before the first compilation, because torch reads the variables once. It checks first that no other
user can change the folder, and writes a test file, because torch reports an unwritable folder as a bare OSError in the
middle of a compilation.

TRITON_CACHE_DIR and TRITON_CACHE_MANAGER are overwritten when they are set: a cache that is packed and moved must be a
single folder, and Triton's own manager stores absolute paths (torch_compat/triton/cache.py).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tcdeploy.cache.contents import AOT_DIR, CACHE_DIRS, CONFLICTS_DIR, TRITON_DIR
from tcdeploy.cache.folder_error import folder_error, translate_os_errors
from tcdeploy.cache.leases import LEASES_DIR, LOCK_FILE, folder_lock
from tcdeploy.cache.manifest import MANIFESTS_DIR, manifest_path
from tcdeploy.cache.staging import StagingFolder, create_private_copy, create_staging_folder, own_staging_folder
from tcdeploy.cache.stored_headers import HEADERS_DIR
from tcdeploy.cache.trust.ownership import check_contents, check_no_links, check_ownership, make_private_folder
from tcdeploy.errors import SpaceError, TcdeployError

MEBIBYTE = 1 << 20
UNPACKING_PREFIX = ".staging-"  # of the folders in which bundles are unpacked; the unpacking process holds the lock
TEST_FILE_PREFIX = ".writable-"
BUNDLES_DIR, HEADER_SUFFIX = "bundles", ".head"  # an unpacked bundle leaves its header with the signatures
# What tcdeploy creates in the folder, besides torch's folders that are named by a hash.
OWN_NAMES = (*CACHE_DIRS, CONFLICTS_DIR, MANIFESTS_DIR, BUNDLES_DIR, LEASES_DIR, HEADERS_DIR, LOCK_FILE)


def activate(
    root: str, plan_key: str, num_buckets: int, is_trusted: bool = False, uses_triton: bool = True
) -> StagingFolder:
    """Check the folder, create it if it is missing, and point torch and Triton at a staging folder in it.

    If the folder holds the plan and is not writable, the staging folder is created in TMPDIR. `is_trusted` skips the
    check that no other user can change the folder. `uses_triton`: False if this start needs no Triton.
    Raises TrustError, SpaceError and TcdeployError.
    """
    with translate_os_errors(root):
        create_folder(root, is_trusted)
    staging = own_staging_folder(root) or _create_staging_folder(root, plan_key, num_buckets, is_trusted)
    Path(staging.path, TRITON_DIR).mkdir(exist_ok=True)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = staging.path
    os.environ["TRITON_CACHE_DIR"] = os.path.join(staging.path, TRITON_DIR)
    if uses_triton:
        from tcdeploy.torch_compat.triton.cache import use_relocatable_cache  # imports Triton

        use_relocatable_cache()
    _pin_ptxas()
    return staging


def create_folder(root: str | Path, is_trusted: bool = False) -> None:
    """Create the cache folder if it is missing. Checks it as `check_folder` does. Raises TrustError and OSError.

    The second check is for a folder that another user creates after the first one. That folder may also disappear, and
    come back after the check, so the folder must exist by then.
    """
    check_folder(root, is_trusted)
    make_private_folder(root)
    check_folder(root, is_trusted, must_exist=True)


def check_folder(root: str | Path, is_trusted: bool = False, must_exist: bool = False) -> None:
    """Raise TrustError if another user could change the folder, or if one of OWN_NAMES in it is a symbolic link.

    `is_trusted` skips the first check. `must_exist` refuses a missing folder, which another user could create after the
    check. Raises TcdeployError if the path cannot be followed.
    """
    with translate_os_errors(str(root)):
        check_no_links(root, (*OWN_NAMES, *_documents(root)))
        if not is_trusted:
            check_ownership(root, must_exist)
            if Path(root).is_dir():
                check_contents(root, [MANIFESTS_DIR, *_documents(root)])


def _documents(root: str | Path) -> Iterator[str]:
    """The files that a start parses before it copies its plan, relative to the folder."""
    for pattern in (f"{MANIFESTS_DIR}/*.json", f"{BUNDLES_DIR}/*{HEADER_SUFFIX}", f"{AOT_DIR}/start-*.json"):
        yield from (path.relative_to(root).as_posix() for path in Path(root).glob(pattern))


def _create_staging_folder(root: str, plan_key: str, num_buckets: int, is_trusted: bool) -> StagingFolder:
    try:
        _ensure_writable(root)
        _check_free_space(root, num_buckets)
        return create_staging_folder(root, is_trusted)
    except TcdeployError:
        if not manifest_path(root, plan_key).is_file():
            raise
        return create_private_copy(root, is_trusted)
    except OSError as error:
        raise folder_error(root, error) from error


def bytes_needed(num_buckets: int) -> int:
    """A generous bound for a cold warm-up: four buckets of builtin:tiny take 6 MiB on a CPU."""
    return (4 + 4 * num_buckets) * MEBIBYTE


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


def _ensure_writable(root: str) -> None:
    with translate_os_errors(root), folder_lock(root):  # garbage collection removes test files under the lock
        Path(root, MANIFESTS_DIR).mkdir(mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=root, prefix=TEST_FILE_PREFIX) as test_file:  # has no name on most disks
            test_file.write(b"x" * 4096)
            test_file.flush()


def _check_free_space(root: str, num_buckets: int) -> None:
    """Only for a folder without programs: a filled one may need no more space."""
    free = shutil.disk_usage(root).free
    if free < bytes_needed(num_buckets) and not any(Path(root).glob("fxgraph/*")):
        raise SpaceError(
            f"the cache folder {root} has {free / MEBIBYTE:.1f} MiB free, and {num_buckets} buckets may need "
            f"{bytes_needed(num_buckets) / MEBIBYTE:.0f} MiB",
            "free space, or choose another folder: --cache-dir DIR",
        )
