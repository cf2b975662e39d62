"""Points torch and Triton at a staging folder. Does not import torch.

`activate` must run before the first compilation, because torch reads the variables once. It checks first that no other
user can change the cache folder, and writes a test file, because torch reports an unwritable folder as a bare OSError
in the middle of a compilation.

TRITON_CACHE_DIR and TRITON_CACHE_MANAGER are overwritten when they are set: a cache that is packed and moved must be a
single folder, and Triton's own manager stores absolute paths (torch_compat/triton/cache.py).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from tcdeploy.cache.folder.access import create_folder, folder_error, translate_os_errors, write_test_file
from tcdeploy.cache.folder.layout import MANIFESTS_DIR, TRITON_DIR, manifest_path
from tcdeploy.cache.folder.leases import folder_lock
from tcdeploy.cache.staging.folder import StagingFolder, create_private_copy, create_staging_folder, own_staging_folder
from tcdeploy.errors import SpaceError, TcdeployError

MEBIBYTE = 1 << 20


def activate(
    root: str, plan_key: str, num_buckets: int, is_trusted: bool = False, uses_triton: bool = True
) -> StagingFolder:
    """Check the folder, create it if it is missing, and point torch and Triton at a staging folder in it.

    If the folder holds the plan and is not writable, the staging folder is created in TMPDIR. `is_trusted` skips the
    check that no other user can change the folder. Raises TrustError, SpaceError and TcdeployError.
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
        write_test_file(root)


def _check_free_space(root: str, num_buckets: int) -> None:
    """Only for a folder without programs: a filled one may need no more space."""
    free = shutil.disk_usage(root).free
    needed = (4 + 4 * num_buckets) * MEBIBYTE  # a generous bound: four buckets of builtin:tiny take 6 MiB on a CPU
    if free < needed and not any(Path(root).glob("fxgraph/*")):
        raise SpaceError(
            f"the cache folder {root} has {free / MEBIBYTE:.1f} MiB free, and {num_buckets} buckets may need "
            f"{needed / MEBIBYTE:.0f} MiB",
            "free space, or choose another folder: --cache-dir DIR",
        )
