"""A start that cannot store its programs changes no plan: it is refused, or warns that nothing was recorded."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tcdeploy.torch_compat.inductor.settings import disabling_settings
from tests.conftest import TINY, TINY_FLAGS, RunCLI, cli_environment
from tests.fork_server import ForkServer

WARM = ("warm", TINY, *TINY_FLAGS, "--programs", "jit")


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name not in ("leases", "precompiled_headers")
    }


@pytest.fixture
def folder(tmp_path: Path, filled_cache: Path) -> Path:
    return Path(shutil.copytree(filled_cache, tmp_path / "cache"))


def start(fork_server: ForkServer, folder: Path, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """`tcdeploy warm` in a process that has run the script."""
    environ = cli_environment(folder.parent)
    return fork_server.run(*WARM, "--cache-dir", str(folder), *flags, environ=environ, script=script)


@pytest.mark.parametrize(
    ("script", "named"),
    [
        (
            "import torch; torch.compiler.config.force_disable_caches = True",
            "torch.compiler.config.force_disable_caches",
        ),
        ("import torch._inductor.config as c; c.fx_graph_cache = False", "torch._inductor.config.fx_graph_cache"),
        ("import torch._dynamo.config as c; c.disable = True", "torch._dynamo.config.disable"),
        ("import torch._dynamo.config as c; c.caching_precompile = True", "torch._dynamo.config.caching_precompile"),
        ("import os; os.environ['TORCHDYNAMO_DISABLE'] = '1'", "TORCHDYNAMO_DISABLE=1"),
    ],
)  # fmt: skip
def test_a_start_without_torchs_caches_is_refused(
    fork_server: ForkServer, folder: Path, script: str, named: str
) -> None:
    before = content(folder)
    done = start(fork_server, folder, script)
    assert done.returncode == 2 and f"error: {named}" in done.stderr, done.stderr
    assert f"hint: unset {named.partition('=')[0]}" in done.stderr
    assert content(folder) == before


@pytest.mark.long  # two cold starts
def test_programs_that_torch_does_not_store_leave_the_plan_unchanged(
    fork_server: ForkServer, folder: Path, run_cli: RunCLI
) -> None:
    """With this setting, Inductor looks up and stores nothing, and counts neither a miss nor a bypass."""
    before = content(folder)
    script = "import torch._functorch.config as c; c.bundled_autograd_cache = True"
    done = start(fork_server, folder, script, "--require-hit")
    assert done.returncode == 6 and "uncached" in done.stdout, done.stderr
    assert "the plan is not recorded" in done.stderr and "they are still not in the cache" in done.stderr
    assert content(folder) == before
    done = start(fork_server, folder, script)
    assert done.returncode == 1 and f"so the plan is not in {folder}" in done.stderr
    assert run_cli(*WARM, "--cache-dir", str(folder), "--require-hit").returncode == 0


def test_the_variable_that_was_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert disabling_settings() == []
    with torch.compiler.config.patch(force_disable_caches=True):
        for name in ("TORCH_COMPILE_FORCE_DISABLE_CACHES", "TORCHINDUCTOR_FORCE_DISABLE_CACHES"):
            monkeypatch.setenv(name, "1")
            assert disabling_settings() == [f"{name}=1"]
