"""What a check returns, and what it is given."""

from __future__ import annotations

import threading
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Literal

from tcdeploy.doctor.torch_probe import TorchProbe, run_torch_probe
from tcdeploy.host.resources import cpu_contention
from tcdeploy.planning.environment import find_cache_dir

State = Literal["ok", "note", "finding"]


@dataclass(frozen=True)
class Result:
    """The result of one check. `finding`: something is wrong. `note`: worth knowing, but no action is needed."""

    check: str
    state: State
    summary: str
    cure: str = ""
    is_blocking: bool = False  # of a finding: a start fails or gives up, instead of being slower or less safe


def ok(summary: str) -> Result:
    return Result("", "ok", summary)


def note(summary: str, cure: str = "") -> Result:
    return Result("", "note", summary, cure)


def finding(summary: str, cure: str) -> Result:
    """A start works, but is slower or less safe."""
    return Result("", "finding", summary, cure)


def blocking(summary: str, cure: str) -> Result:
    """A start fails."""
    return Result("", "finding", summary, cure, is_blocking=True)


def unchecked(reason: str) -> Result:
    return Result("", "note", f"could not be checked: {reason}")


def missing(request: Request, section: str, summary: str, cure: str) -> Result:
    """For a section that the probe lacks: blocking if it failed itself, and not what it needs."""
    probe = request.probe
    is_cause = probe.fails(section) and (section in ("driver", "torch") or "torch" in probe.sections)
    return blocking(f"{summary}: {probe.reason(section)}", cure) if is_cause else unchecked(probe.reason(section))


@dataclass(kw_only=True)
class Request:
    """What to check. Its checks run in several threads."""

    cache_dir: str | None = None  # None: the folder that a start would use
    is_trusted: bool = False
    port: int = 0
    is_offline: bool = False
    other_variables: Set[str] = frozenset()  # of tcdeploy, that set no key of a recipe
    run_probe: Callable[[], TorchProbe] = run_torch_probe  # called once, by the first check that needs it
    busy: str = field(default_factory=cpu_contention)  # before the checks, which use the cores themselves
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _probe: TorchProbe | None = field(default=None, init=False)

    @property
    def probe(self) -> TorchProbe:
        with self._lock:
            if self._probe is None:
                self._probe = self.run_probe()
            return self._probe

    @property
    def cache_folder(self) -> str:
        return find_cache_dir(self.cache_dir)[0]


Check = Callable[[Request], Result | list[Result]]  # examination.py fills in the name of the check
