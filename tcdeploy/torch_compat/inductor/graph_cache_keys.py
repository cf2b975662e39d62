"""Keys of Inductor's graph cache that do not depend on which other modules a process has imported.

Inductor pickles the inputs of a compilation and hashes the bytes. torch pickles a memory format by the name of the
first module in `sys.modules` that has an attribute `torch`: usually torch._utils, sometimes another, and then every
program is a miss. With Cython installed, `tcdeploy serve` missed all that `tcdeploy warm` had compiled, because
Cython's stand-ins for C modules have every attribute. tests/torch_compat/test_graph_cache_keys.py fails when torch no
longer needs the patch.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tcdeploy.torch_compat.internal import find, internal, mentions

PICKLER = "torch._inductor.codecache:FxGraphCachePickler"


@internal("graph cache keys", "torch._inductor.codecache.FxGraphCachePickler.dispatch_table",
          "a program may compile again in a process that has imported other modules")  # fmt: skip
def supported() -> bool:
    """Whether the pickler still builds its own dispatch table when it is created."""
    return mentions(find(f"{PICKLER}.__init__"), "dispatch_table")


@functools.cache
def pickle_memory_formats_by_name() -> None:
    """Patch the pickler, once per process; call it before the first compilation. A key is never unpickled."""
    if not supported():
        return
    pickler_class = find(PICKLER)
    original_init = pickler_class.__init__

    def init_with_formats(pickler: Any, *args: Any, **kwargs: Any) -> None:
        original_init(pickler, *args, **kwargs)
        pickler.dispatch_table[torch.memory_format] = _reduce_memory_format

    pickler_class.__init__ = init_with_formats


def _reduce_memory_format(memory_format: torch.memory_format) -> tuple[type[str], tuple[str]]:
    return str, (str(memory_format),)
