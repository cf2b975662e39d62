"""Who comes in, and who is told to come back."""

from __future__ import annotations

import pytest

from tcdeploy.server.admission import Admission
from tcdeploy.server.protocol import ApiError


def test_as_many_as_run_and_wait_come_in() -> None:
    admission = Admission(max_queued=2)
    with pytest.raises(ApiError) as refused:
        admission.acquire(1)
    assert (refused.value.status, refused.value.code) == (503, "loading")
    admission.open(max_running=4)
    admission.acquire(5)
    with pytest.raises(ApiError) as refused:
        admission.acquire(2)
    assert (refused.value.status, refused.value.code, refused.value.retry_after) == (503, "queue_full", 1)
    admission.release(1)
    admission.acquire(2)
    assert admission.num_admitted == 6
    assert (admission.rejections["loading"], admission.rejections["queue_full"]) == (1, 1)


def test_what_never_fits_is_not_told_to_come_back() -> None:
    admission = Admission(max_queued=2)
    admission.open(max_running=4)
    with pytest.raises(ApiError) as refused:
        admission.acquire(7)
    assert (refused.value.status, refused.value.param) == (400, "n")
    assert admission.num_admitted == 0 and not sum(admission.rejections.values())
