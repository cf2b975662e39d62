"""Autotune winners without their own place: where the cache folder has moved, they are still found.

Of the variants of a kernel torch times each and keeps the name of the fastest in a file beside the kernel's source. A
kernel that is read back with its program (Inductor's static launcher) brings the path of that source along, as it was
where the program was made: there it looks, and there it would write. Where the folder was moved, copied or came out of
a bundle, every start timed all variants again, chose anew, and made folders by the names of another machine.

Sources stand two levels below the folder that Inductor uses, by the hash of their text, so the last two names of a path
are enough. torch 2.11 to 2.13; tests/torch_compat/test_autotune_cache.py fails when torch does without it.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from torch._inductor.runtime.autotune_cache import AutotuneCache
from torch._inductor.runtime.cache_dir_utils import cache_dir


@functools.cache
def relocate_autotune_cache() -> None:
    """For this process, before it reads its first program: every winner is in the folder that Inductor uses now.

    Inductor's workers read no programs, and the paths that they are given are this process's.
    """
    create, restore = AutotuneCache.create, AutotuneCache.__setstate__

    def create_relocated(inductor_meta: dict[str, object], filename: str, configs_hash: str) -> AutotuneCache | None:
        return create(inductor_meta, _relocate(filename), configs_hash)

    def restore_relocated(entry: AutotuneCache, state: dict[str, Any]) -> None:
        restore(entry, state)
        if entry.local_cache is not None:
            cache, path = entry.local_cache
            entry.local_cache = cache, _relocate(path)

    AutotuneCache.create = staticmethod(create_relocated)  # type: ignore[method-assign]
    AutotuneCache.__setstate__ = restore_relocated  # type: ignore[assignment,method-assign]


def _relocate(path: str) -> str:
    return os.path.join(cache_dir(), *Path(path).parts[-2:])
