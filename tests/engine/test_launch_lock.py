"""How long other threads wait for a launch."""

from __future__ import annotations

import threading
import time

import pytest

from tcdeploy.engine.step.launch_timer import LaunchLock


def test_without_a_launch_nobody_waits() -> None:
    lock = LaunchLock()
    with lock:
        pass
    start = time.perf_counter()
    lock.wait(60.0)
    assert time.perf_counter() - start < 30


def test_a_launch_that_raises_is_over() -> None:
    lock = LaunchLock()
    with pytest.raises(RuntimeError), lock:
        raise RuntimeError
    start = time.perf_counter()
    lock.wait(60.0)
    assert time.perf_counter() - start < 30


def test_a_thread_waits_until_the_launch_is_over() -> None:
    lock, has_begun, ends = LaunchLock(), threading.Event(), []

    def launch() -> None:
        with lock:
            has_begun.set()
            time.sleep(0.05)
            ends.append(time.perf_counter())

    thread = threading.Thread(target=launch)
    thread.start()
    assert has_begun.wait(60)
    lock.wait(60.0)
    assert ends and time.perf_counter() >= ends[0]
    thread.join()


def test_all_waits_for_one_launch_take_a_limited_time_together() -> None:
    """Otherwise many streams would block the event loop for the whole launch."""
    lock, start = LaunchLock(), time.perf_counter()
    with lock:
        for _ in range(1000):
            lock.wait(0.05)
        assert 0.05 <= time.perf_counter() - start < 30  # 50 s without the limit
