"""The process that compiles buckets of a plan for another process (start/workers/process.py).

It warms buckets of the model of its recipe, as `tcdeploy warm` does, and exits with that command's exit codes. It runs
at low priority, and the kernel kills it when the other process ends. It reports each finished bucket as a line of JSON;
the bucket's files are in the journal of its staging folder by then. Its messages go to stderr.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
from functools import partial
from typing import IO, TYPE_CHECKING

from tcdeploy.errors import TcdeployError
from tcdeploy.host.die_with_parent import die_with_parent
from tcdeploy.host.gc_policy import relax_gc_for_startup
from tcdeploy.models.unused_packages import enable_fast_transformers_import
from tcdeploy.planning.environment import lists_to_tuples
from tcdeploy.planning.recipe import Recipe

if TYPE_CHECKING:
    from tcdeploy.planning.bucket_record import BucketRecord

PRIORITY = 10  # added to the nice value of the other process
log = logging.getLogger("tcdeploy.start")


def write_report(reports: IO[str], record: BucketRecord) -> None:
    """Write the record of a finished bucket, as a line of JSON."""
    log.info("%s: %s, %.1f s", record.bucket, record.outcome, record.seconds)
    reports.write(json.dumps(dataclasses.asdict(record)) + "\n")
    reports.flush()


def main() -> None:
    """Read a request from stdin, and compile its buckets.

    It has "parent", the id of the other process, "reports", the descriptor for reports, "recipe", "plan", the key of
    the plan to which the programs belong, "buckets", their names, and "staging", the folder for its staging folder,
    null for the cache folder.
    """
    request = json.load(sys.stdin)
    die_with_parent(request["parent"])
    os.nice(PRIORITY)
    relax_gc_for_startup()
    enable_fast_transformers_import()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    from tcdeploy.cache.staging import folder as staging
    from tcdeploy.start.model_code import compile_buckets  # imports torch, which takes seconds

    staging.worker_parent = request["staging"]

    try:
        with open(request["reports"], "w", encoding="utf-8") as reports:
            recipe = Recipe(**lists_to_tuples(request["recipe"]))
            compile_buckets(recipe, request["plan"], request["buckets"], partial(write_report, reports))
    except TcdeployError as error:
        log.error("%s", error.message)
        sys.exit(error.exit_code)
