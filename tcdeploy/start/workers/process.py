"""Starts and watches a process that compiles some buckets of a plan while this process does something else.

The process (start/workers/worker.py) warms a short copy of the model (models/short_config.py) with random weights, in a
staging folder of the same cache folder. It gets its request as JSON on stdin, and reports each finished bucket as a
line of JSON through a pipe. Its messages are logged at debug level; the last ones explain a failure.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tcdeploy.cache.staging.folder import own_staging_folder
from tcdeploy.host.temporary_files import temporary_folder
from tcdeploy.host.typed_json import from_json
from tcdeploy.planning.bucket_record import BucketRecord
from tcdeploy.planning.recipe import Recipe

# The worker runs the package of this process, which need not be the one that is installed.
PACKAGE_PARENT = str(Path(__file__).resolve().parents[3])
COMMAND = f"import sys; sys.path.insert(0, {PACKAGE_PARENT!r}); from tcdeploy.start.workers.worker import main; main()"
MAX_FAILURE_LINES = 5
READ_TIMEOUT_S = 1.0
POLL_INTERVAL_S = 0.02
log = logging.getLogger("tcdeploy.start")


def _private_parent(recipe: Recipe) -> str | None:
    """The private folder of this start's staging folders; None if they are in the cache folder."""
    staging = own_staging_folder(recipe.cache_dir, clear=False) if recipe.cache_dir else None
    return staging.parent if staging is not None and staging.parent != staging.cache_folder else None


class CompileProcess:
    """A running compile worker. `poll` and `stop` may be called from several threads.

    The kernel ends the worker when the thread that created it ends (start/workers/worker.py), so that thread must live
    as long as the worker is needed.
    """

    def __init__(self, recipe: Recipe, config: dict[str, Any], plan_key: str, buckets: Sequence[str]) -> None:
        """`config`: replaces the model of `recipe`. `plan_key`: to which the worker's files belong. Raises OSError."""
        self.buckets = tuple(buckets)
        self._cleanup, self._cleanup_lock = contextlib.ExitStack(), threading.Lock()
        folder = self._cleanup.enter_context(temporary_folder("config"))
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        self.finished: dict[str, BucketRecord] = {}  # by name; their files are in the worker's journal
        self._last_lines: deque[str] = deque(maxlen=MAX_FAILURE_LINES)
        self._started_at = time.monotonic()
        reports, reports_end = os.pipe()
        try:
            # -P: do not search the current folder for modules. A session of its own, so that Ctrl-C ends only this
            # process.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", COMMAND], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True, pass_fds=(reports_end,),
            )  # fmt: skip
        except BaseException:
            os.close(reports)
            self._remove_folder()
            raise
        finally:
            os.close(reports_end)
        fields = dataclasses.asdict(dataclasses.replace(recipe, model=str(folder)))
        self._readers = [
            threading.Thread(target=self._log_messages, name="compile-messages", daemon=True),
            threading.Thread(target=self._read_reports, args=(reports,), name="compile-reports", daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:  # `poll` reports that it has ended
            request = {"recipe": fields, "plan": plan_key, "buckets": self.buckets, "staging": _private_parent(recipe)}
            stdin.write(json.dumps({"parent": os.getpid(), "reports": reports_end, **request}))
        log.info("%s compiles %s", self.description, ", ".join(self.buckets))

    @property
    def description(self) -> str:
        return f"compile worker {self._process.pid}"

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self._started_at

    @property
    def failure(self) -> str:
        """Why an ended worker did not finish all buckets: its last messages, its exit code, or what its plan lacks."""
        if self._process.returncode == 0:
            return "it ended without an error, but its plan does not contain these buckets"
        return "; ".join(self._last_lines) or f"exit code {self._process.returncode}"

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        code = self._process.poll()
        if code is not None:
            for reader in self._readers:  # they end with the process, unless a compiler of it still runs
                reader.join(READ_TIMEOUT_S)
            self._remove_folder()
        return code

    def wait_for(self, bucket: str) -> BucketRecord | None:
        """Wait until the worker has finished this bucket. Returns None if it ends before."""
        while bucket not in self.finished and self.poll() is None:
            time.sleep(POLL_INTERVAL_S)
        return self.finished.get(bucket)

    def stop(self) -> None:
        """Kill the worker and the compilers that it has started."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._remove_folder()

    def _remove_folder(self) -> None:
        with self._cleanup_lock:
            self._cleanup.close()

    def _read_reports(self, descriptor: int) -> None:
        with open(descriptor, encoding="utf-8") as reports:
            for line in reports:
                record = from_json(BucketRecord, json.loads(line))
                self.finished[record.bucket] = record

    def _log_messages(self) -> None:
        for line in self._process.stderr or ():
            self._last_lines.append(line.strip())
            log.debug("compile worker: %s", line.rstrip())
