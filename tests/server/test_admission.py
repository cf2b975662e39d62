"""Admission: which requests are admitted, which are rejected for now, and which can never be admitted."""

from __future__ import annotations

import pytest

from tcdeploy.server.admission import Admission
from tcdeploy.server.protocol import ApiError


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
