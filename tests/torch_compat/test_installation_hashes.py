"""The thread fills the caches of torch's and Triton's own hash functions."""

import hashlib

import pytest

from tcdeploy.torch_compat.inductor import installation_hashes
from tcdeploy.torch_compat.inductor.installation_hashes import TORCH_KEY, TRITON_KEY, start_hashing
from tcdeploy.torch_compat.internal import find

pytest.importorskip("triton")


def test_a_look_up_after_the_thread_hashes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = start_hashing()
    assert thread is not None
    thread.join()

    def fail(*_: object) -> None:
        raise AssertionError("hashed again")

    monkeypatch.setattr(hashlib, "sha256", fail)
    assert find(TORCH_KEY)() and find(TRITON_KEY)()


def test_a_start_that_compiles_nothing_does_not_hash_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    monkeypatch.setattr(installation_hashes, "find", lambda name: lambda: hashed.append(name))
    monkeypatch.setattr(installation_hashes, "supported", lambda: True)
    for compiles, expected in ((False, [TRITON_KEY]), (True, [TORCH_KEY, TRITON_KEY])):
        hashed.clear()
        thread = start_hashing(compiles)
        assert thread is not None
        thread.join()
        assert hashed == expected


def test_an_error_in_the_thread_is_logged_and_not_raised(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "tcdeploy.programs")
    monkeypatch.setattr(installation_hashes, "TRITON_KEY", "os:abort_is_not_here")
    monkeypatch.setattr(installation_hashes, "supported", lambda: True)
    thread = start_hashing()
    assert thread is not None
    thread.join()
    assert "could not be hashed" in caplog.text
