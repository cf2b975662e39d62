"""Hashes in threads what the names of programs depend on: the installations of torch and Triton, and our sources.

Parsing the sources holds the GIL for 0.2 s. Most starts do it while they wait for the weights. The first start of
packages that were built without the GPU does it while their files are copied.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from tcdeploy.programs.aot import package_folder
from tcdeploy.programs.passes.post_grad import op_source_digests
from tcdeploy.start.planned import PlannedModel
from tcdeploy.torch_compat.inductor.installation_hashes import start_hashing

log = logging.getLogger("tcdeploy.start")


def hash_in_advance(planned: PlannedModel) -> Callable[[], None]:
    """Start the threads. Returns a function that waits for the hashes of sources.

    `origin_of` and `install_programs` need these. Without waiting, they would parse the remaining files too. Packages
    may need the hash of torch's installation only if they are compiled: see `start_hashing`.
    """
    if planned.plan.programs == "jit":
        start_hashing()
    thread = threading.Thread(target=_hash_sources, args=(planned,), name="sources", daemon=True)
    thread.start()
    return thread.join


def _hash_sources(planned: PlannedModel) -> None:
    try:
        digests = op_source_digests()
        if planned.plan.programs == "aot":
            package_folder("", "", digests, {}, planned.fake_model)
    except (OSError, SyntaxError) as error:  # the caller of `origin_of` raises it again
        log.debug("the sources could not be hashed in advance: %s", error)
