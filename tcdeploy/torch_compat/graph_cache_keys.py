"""Keys of torch's cache that do not depend on what else a process has imported.

torch pickles what a program is made from and hashes the bytes. A memory format is pickled by the name of the first
module in `sys.modules` that has an attribute `torch`: mostly torch._utils, and sometimes another. Then every tensor has
another key, and every program is a miss. Where Cython is installed, `tcdeploy serve` did not find what `tcdeploy warm`
had made: Cython's stand-ins for C modules have every attribute.

torch 2.11 to 2.13; tests/torch_compat/test_graph_cache_keys.py fails when torch does without it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._inductor.codecache import FxGraphCachePickler


@functools.cache
def pickle_memory_formats_by_name() -> None:
    """For this process, before its first compile. What is pickled for a key is never unpickled."""
    original_init = FxGraphCachePickler.__init__

    def init_with_formats(pickler: FxGraphCachePickler, *args: Any, **kwargs: Any) -> None:
        original_init(pickler, *args, **kwargs)
        pickler.dispatch_table[torch.memory_format] = _reduce_memory_format  # type: ignore[index]

    FxGraphCachePickler.__init__ = init_with_formats  # type: ignore[assignment,method-assign]


def _reduce_memory_format(memory_format: torch.memory_format) -> tuple[type[str], tuple[str]]:
    return str, (str(memory_format),)
