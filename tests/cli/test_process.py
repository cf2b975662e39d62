"""The command line changes its process; `prepare()` as a library call does not."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest

from tcdeploy.cli.process import LOGGER_NAME, configure_process
from tcdeploy.host.gc_policy import STARTUP_THRESHOLD, freeze_gc_after_startup


@pytest.fixture
def restored_process() -> Iterator[None]:
    """Restores the GC threshold and the log handlers of the test process."""
    threshold, handlers = gc.get_threshold(), logging.getLogger(LOGGER_NAME).handlers[:]
    yield
    freeze_gc_after_startup()
    gc.unfreeze()
    gc.set_threshold(*threshold)
    logging.getLogger(LOGGER_NAME).handlers[:] = handlers


@pytest.mark.usefixtures("restored_process")
def test_startup_defers_garbage_collection() -> None:
    configure_process()
    assert gc.get_threshold()[0] == STARTUP_THRESHOLD


@pytest.mark.usefixtures("restored_process")
def test_log_records_go_to_stderr_once_in_the_format_of_the_cli(capsys: pytest.CaptureFixture[str]) -> None:
    configure_process()
    configure_process()
    logging.getLogger(f"{LOGGER_NAME}.planning").warning("%s is slow", "a disk")
    logging.getLogger("other").warning("not formatted")
    assert capsys.readouterr().err.splitlines()[0] == "warning: a disk is slow"
