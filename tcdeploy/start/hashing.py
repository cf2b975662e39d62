"""Hashes in threads what the names of programs depend on: the installations of torch and Triton, and our sources.

Parsing the sources holds the GIL for 0.2 s. Most starts do it while they wait for the weights. The first start of
packages that were built without the GPU does it while the GPU computes the reference, because Python has little
to do then.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from tcdeploy.programs.aot import package_folder
from tcdeploy.programs.passes.post_grad import op_source_digests
from tcdeploy.start.planned import PlannedModel
from tcdeploy.torch_compat.inductor.installation_hashes import start_hashing

log = logging.getLogger("tcdeploy.start")


def hash_in_advance(is_first_start: bool) -> None:
    """Start the threads. The first start of packages compiles nothing, and hashes the sources in `hashing_sources`."""
    start_hashing(compiles=not is_first_start)
    if not is_first_start:
        threading.Thread(target=op_source_digests, daemon=True).start()  # cached for `origin_of`


@contextlib.contextmanager
def hashing_sources(planned: PlannedModel) -> Iterator[None]:
    """Hash the sources of packages in a thread during the block, for `origin_of` and `install_programs`."""
    thread = threading.Thread(target=_hash_sources, args=(planned,), name="sources", daemon=True)
    thread.start()
    yield
    thread.join()  # otherwise the caller would parse the remaining files too


def _hash_sources(planned: PlannedModel) -> None:
    try:
        package_folder("", "", op_source_digests(), {}, planned.fake_model)
    except (OSError, SyntaxError) as error:  # the caller of `origin_of` raises it again
        log.debug("the sources could not be hashed in advance: %s", error)
