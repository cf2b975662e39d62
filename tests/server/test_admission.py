"""Admission: which requests are admitted, which are rejected for now, and which can never be admitted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tcdeploy.server.apis.openai.protocol import ApiError
from tcdeploy.server.generate import admission as admission_module
from tcdeploy.server.generate.admission import Admission, BodyReservation
from tcdeploy.server.http.request_parsing import SMALL_BODY_BYTES


def test_running_and_queued_choices_are_admitted_up_to_the_limit() -> None:
    admission = Admission(max_queued=2)
    with pytest.raises(ApiError) as rejection:
        admission.acquire(1)
    assert (rejection.value.status, rejection.value.code) == (503, "loading")
    admission.open(max_running=4)
    admission.acquire(5)
    with pytest.raises(ApiError, match="5 choices are running or queued.* adds 2; the limit is 6") as rejection:
        admission.acquire(2)
    assert (rejection.value.status, rejection.value.code, rejection.value.retry_after) == (503, "queue_full", 1)
    admission.release(1)
    admission.acquire(2)
    assert admission.num_admitted == 6
    assert (admission.rejections["loading"], admission.rejections["queue_full"]) == (1, 1)


def test_a_request_over_the_limit_alone_gets_400_and_no_retry_after() -> None:
    admission = Admission(max_queued=2)
    admission.open(max_running=4)
    with pytest.raises(ApiError, match="has 7 choices .*; the limit is 6") as rejection:
        admission.acquire(7)
    assert (rejection.value.status, rejection.value.param) == (400, "n")
    assert admission.num_admitted == 0 and not sum(admission.rejections.values())


def test_requests_with_many_choices_leave_room_for_others() -> None:
    admission = Admission(max_queued=256)
    admission.open(max_running=4)
    admission.acquire(128)
    with pytest.raises(ApiError, match="this request adds 128; the limit is 228") as rejection:
        admission.acquire(128)
    assert (rejection.value.status, rejection.value.code) == (503, "queue_full")
    for _ in range(260 - 128):
        admission.acquire(1)
    admission.release(260)
    admission.acquire(260)  # alone, a request may have as many choices as fit


def test_large_bodies_wait_up_to_a_number_of_bytes_and_small_ones_always() -> None:
    large = 10 * SMALL_BODY_BYTES
    admission = Admission(max_queued=2, max_waiting_bytes=3 * large)
    with BodyReservation(admission) as first, BodyReservation(admission) as second, BodyReservation(admission) as third:
        for reservation in (first, second):
            reservation.grow(SMALL_BODY_BYTES)
            assert admission.num_waiting_bytes % large == 0, "a small body does not count"
            reservation.grow(large)
        second.grow(2 * large)
        third.grow(SMALL_BODY_BYTES)
        with pytest.raises(ApiError, match=f"{3 * large} bytes of large requests are waiting") as rejection:
            third.grow(SMALL_BODY_BYTES + 1)
        assert (rejection.value.status, rejection.value.code, rejection.value.retry_after) == (503, "bodies_full", 1)
        first.release()
        first.release()
        third.grow(large)
        assert admission.num_waiting_bytes == 3 * large
    assert admission.num_waiting_bytes == 0 and admission.rejections["bodies_full"] == 1


def test_the_seconds_of_a_start_do_not_count_as_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: now)
    monkeypatch.setattr(admission_module, "time", clock)
    now = 1000.0
    admission = Admission(max_queued=2)
    now += 60
    assert admission.idle_seconds() == 0
    admission.open(max_running=4)
    assert admission.idle_seconds() == 0
    now += 3
    assert admission.idle_seconds() == 3
    admission.acquire(1)
    now += 5
    assert admission.idle_seconds() == 0
    admission.release(1)
    now += 2
    assert admission.idle_seconds() == 2
