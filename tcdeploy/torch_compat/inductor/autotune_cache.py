"""Find Inductor's autotune results in a cache folder that has moved.

torch times the variants of a kernel and stores the name of the fastest beside the kernel's source. A kernel that is
loaded together with its program (Inductor's static launcher) carries the absolute path of that source from the
process that compiled it. Each start has its own staging folder, so torch would look under an old path, time all
variants again, and might choose another. Sources are stored two levels below the cache folder, by the hash of their
text, so the last two parts of a path identify the file. tests/torch_compat/test_autotune_cache.py fails when torch no
longer needs the patch.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from tcdeploy.torch_compat.internal import find, has_parameters, internal, mentions

AUTOTUNE_CACHE = "torch._inductor.runtime.autotune_cache:AutotuneCache"
CACHE_DIR = "torch._inductor.runtime.cache_dir_utils:cache_dir"


@internal("autotune cache", "torch._inductor.runtime.autotune_cache.AutotuneCache.create",
          "kernels are timed again at every start")  # fmt: skip
def supported() -> bool:
    """Whether entries are created and restored with a path, in the form that the patch rewrites."""
    create, restore = find(f"{AUTOTUNE_CACHE}.create"), vars(find(AUTOTUNE_CACHE) or object).get("__setstate__")
    return (
        callable(find(CACHE_DIR))
        and callable(restore)
        and has_parameters(create, "inductor_meta", "filename", "configs_hash")
        and mentions(create, "local_cache")
    )


@functools.cache
def relocate_autotune_cache() -> None:
    """Look up every result in the folder that Inductor uses now; call it before the process loads a program.

    Inductor's compile workers need no patch: they load no programs, and receive this process's paths.
    """
    if not supported():
        return
    cache_class = find(AUTOTUNE_CACHE)
    create, restore = cache_class.create, cache_class.__setstate__

    def create_relocated(inductor_meta: dict[str, object], filename: str, configs_hash: str) -> Any:
        return create(inductor_meta, _relocate(filename), configs_hash)

    def restore_relocated(entry: Any, state: dict[str, Any]) -> None:
        restore(entry, state)
        if entry.local_cache is not None:
            cache, path = entry.local_cache
            entry.local_cache = cache, _relocate(path)

    cache_class.create = staticmethod(create_relocated)
    cache_class.__setstate__ = restore_relocated


def _relocate(path: str) -> str:
    return os.path.join(find(CACHE_DIR)(), *Path(path).parts[-2:])
