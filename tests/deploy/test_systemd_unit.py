"""recipes/deploy/systemd: the unit is valid and hardened, drains before it is killed, and its settings are accepted."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tcdeploy import errors
from tests.deploy.recipe_files import DEPLOY, check_settings, read_variables

UNIT = DEPLOY / "systemd/tcdeploy.service"
ENVIRONMENT = DEPLOY / "systemd/tcdeploy.env"
MAX_EXPOSURE = 25  # of `systemd-analyze security`, in tenths: 0 is safest, 100 is a unit without hardening


@pytest.fixture(scope="module")
def service() -> dict[str, str]:
    """The last value of each key of [Service]."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(UNIT.read_text())
    return dict(parser["Service"])


def analyze(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze on a unit whose program is one of this machine."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    unit = folder / UNIT.name
    unit.write_text(text.replace("/opt/tcdeploy/bin/tcdeploy", sys.executable))
    return subprocess.run(["systemd-analyze", *arguments, str(unit)], capture_output=True, text=True)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    verified = analyze(tmp_path, UNIT.read_text(), "verify")
    assert (verified.returncode, verified.stderr) == (0, "")
    misspelled = analyze(tmp_path, UNIT.read_text().replace("ProtectSystem=", "ProtectSytem="), "verify")
    assert "'ProtectSytem'" in misspelled.stderr


def test_the_unit_is_hardened(tmp_path: Path) -> None:
    options = ("security", "--offline=yes", f"--threshold={MAX_EXPOSURE}")
    assert analyze(tmp_path, UNIT.read_text(), *options).returncode == 0
    unprotected = re.sub(r"^(Protect|Restrict|SystemCall)\w+=.*\n", "", UNIT.read_text(), flags=re.MULTILINE)
    assert analyze(tmp_path, unprotected, *options).returncode != 0, "the threshold finds missing options"


def test_the_settings_are_accepted(service: dict[str, str], tmp_path: Path) -> None:
    program, command, *arguments = service["ExecStart"].split()
    assert (program, command) == ("/opt/tcdeploy/bin/tcdeploy", "serve")
    variables = dict(item.split("=", 1) for item in service["Environment"].split())
    check_settings(arguments, variables | read_variables(ENVIRONMENT.read_text()))
    assert variables["TCDEPLOY_CACHE_DIR"] == f"/var/cache/{service['CacheDirectory']}"
    assert service["EnvironmentFile"] == f"/etc/tcdeploy/{ENVIRONMENT.name}"


def test_the_unit_stops_later_than_the_server_drains(service: dict[str, str]) -> None:
    drain_s = float(read_variables(ENVIRONMENT.read_text())["TCDEPLOY_DRAIN_TIMEOUT"])
    assert float(service["TimeoutStopSec"]) >= drain_s + 10
    assert service["KillMode"] == "mixed", "the process that renders chat templates must outlive the drain"


def test_a_failure_that_a_restart_cannot_cure_is_not_restarted(service: dict[str, str]) -> None:
    lasting = (errors.UsageError, errors.MismatchError, errors.TrustError, errors.IntegrityError, errors.ThresholdError)
    codes = {int(code) for code in service["RestartPreventExitStatus"].split()}
    assert service["Restart"] == "on-failure"
    assert codes == {error.exit_code for error in lasting}
    assert not codes & {errors.NetworkError.exit_code, errors.SpaceError.exit_code, 1}
