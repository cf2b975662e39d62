"""A start refuses systems and interpreters that cannot run a model."""

from __future__ import annotations

import sys

import pytest

from tcdeploy.errors import UsageError
from tcdeploy.planning.extras import check_interpreter


def test_linux_is_supported() -> None:
    check_interpreter()


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_another_system_is_named(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(UsageError, match=f"on Linux only, and this system is {system}") as caught:
        check_interpreter()
    assert "container" in caught.value.hint
