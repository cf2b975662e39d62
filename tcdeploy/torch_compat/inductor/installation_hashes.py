"""Hashes the installations of torch and Triton in a thread.

Both hashes are part of every compile cache key, and are otherwise computed at the first look-up: 0.6 s of a warm start
on an H100 machine, mostly for Triton's compiler library of some 400 MB. Reading and hashing release the GIL, so the
thread runs while the weights are loaded. torch and Triton cache their results.
"""

from __future__ import annotations

import logging
import threading

from tcdeploy.planning.extras import is_installed
from tcdeploy.torch_compat.internal import find, internal

TORCH_KEY = "torch._inductor.codecache:torch_key"
TRITON_KEY = "triton.runtime.cache:triton_key"
log = logging.getLogger("tcdeploy.programs")


@internal("installation hashes", "torch._inductor.codecache.torch_key",
          "each start hashes the installations of torch and Triton in its main thread")  # fmt: skip
def supported() -> bool:
    return callable(find(TORCH_KEY)) and (not is_installed("triton") or hasattr(find(TRITON_KEY), "cache_info"))


def start_hashing(compiles: bool = True) -> threading.Thread | None:
    """Compute the hashes in a thread. The start need not wait for it. None if they are not supported.

    `compiles`: hash torch too. Only programs that torch compiles or finds in its caches need this hash, which holds the
    GIL for 0.14 s.
    """
    if not supported():
        return None
    thread = threading.Thread(target=_hash, args=(compiles,), name="installation-hashes", daemon=True)
    thread.start()
    return thread


def _hash(compiles: bool) -> None:
    try:
        if compiles:
            find(TORCH_KEY)()
        if is_installed("triton"):
            find(TRITON_KEY)()
    except Exception as error:  # the look-up raises it again
        log.debug("the installations of torch and Triton could not be hashed in advance: %s", error)
