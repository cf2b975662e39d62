"""What the tests share: one warmed tiny deployment, small random models of any family, and runs of the real CLI."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.gc_policy import relax_gc_for_startup
from tests.fork_server import ForkServer

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: two workers with two threads each wait on one another
# Torch tries six sets of vector instructions by compiling and loading a library for each: 8 s in every new cache
# folder, 1 s in every process. This takes the processor at its word.
VEC_ISA_VARIABLE = "TORCHINDUCTOR_VEC_ISA_OK"
os.environ.setdefault(VEC_ISA_VARIABLE, "1")
# A cold start is mostly g++, 0.6 s a kernel, and many tests start the same model: a kernel that this run of the tests
# has compiled comes from this folder the next time (compilers/g++). Torch calls a compiler all the same.
COMPILER_CACHE_VARIABLE = "TEST_COMPILER_CACHE"
INHERITED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
SPEEDUP_VARIABLES = (VEC_ISA_VARIABLE, COMPILER_CACHE_VARIABLE)
_active_speedups = list(SPEEDUP_VARIABLES)  # that runs of the command take, but where one would hide something

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # as the tests found theirs
TINY = "builtin:tiny"
TINY_BUCKETS = (32, 128)
TINY_BATCH_SIZES = (1, 4)
# Tests with the marker `compiles`, which `scripts/test --quick` leaves out: those that use one of these fixtures, and
# those below these paths, which compile, start a model, or run kernels in Triton's interpreter for many seconds.
COMPILING_FIXTURES = frozenset({"cache_dir", "fork_server", "reference_tiny", "tiny_deployment", "warm_cache"})
COMPILING_PATHS = (
    "attention/", "bench/test_measure.py", "bundle/test_relocation.py", "bundle/test_why.py", "cache/test_folder.py",
    "compiler/", "engine/test_tuning.py", "gpu/", "linear/", "models/test_packed_linears.py", "passes/",
    "test_prewarm.py", "test_story.py", "torch_compat/",
)  # fmt: skip

relax_gc_for_startup()  # as the command does


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that compile or start a model, and skip GPU tests if torch sees no GPU."""
    for item in items:
        path = item.path.relative_to(ROOT / "tests").as_posix()
        if path.startswith(COMPILING_PATHS) or COMPILING_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.compiles)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(scope="session", autouse=True)
def caching_compiler(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Before the others on PATH, for whatever starts from here on. Workers share what is remembered."""
    if shutil.which("g++") is None:
        return
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "remembered"
    folder.mkdir(exist_ok=True)
    os.environ[COMPILER_CACHE_VARIABLE] = str(folder)
    os.environ["PATH"] = f"{ROOT / 'tests' / 'compilers'}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture(autouse=True)
def precompiled_headers() -> None:
    """A warm start in this process has told Inductor that there is no header to prepare: what is compiled by a test
    that starts nothing would take twice as long."""
    if "torch._inductor.codecache" in sys.modules:
        from tcdeploy.cache.toolchain import use_precompiled_headers

        use_precompiled_headers(True)


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One compile cache for all in-process tests: torch reads its place once per process."""
    return str(tmp_path_factory.mktemp("cache"))


_deployments: dict[str, Any] = {}


def reset_programs() -> None:
    """Let torch forget what it compiled, so that counts start at zero; deployments of before are sealed and useless."""
    import torch

    torch._dynamo.reset()
    _deployments.clear()


@pytest.fixture
def tiny_deployment(cache_dir: str) -> Any:
    """The embedded model, warmed once, and again (from the cache) after a test that made torch forget."""
    return prepare_tiny(cache_dir)


def prepare_tiny(cache_dir: str, **asked: Any) -> Any:
    """The embedded model prepared with other flags as well; each set of flags once."""
    from tcdeploy.pipeline import prepare
    from tcdeploy.planning.recipe import build_recipe

    key = repr(sorted(asked.items()))
    if key not in _deployments:
        flags = {"model": TINY, "buckets": TINY_BUCKETS, "batch_sizes": TINY_BATCH_SIZES, "cache_dir": cache_dir}
        _deployments[key] = prepare(build_recipe({**flags, **asked}, environ={}))
    return _deployments[key]


@pytest.fixture(scope="session")
def reference_tiny() -> Any:
    """The same weights in plain transformers, as anyone would load them."""
    import torch
    from transformers import AutoModelForCausalLM

    from tcdeploy.models.load import resolve_model_path

    return AutoModelForCausalLM.from_pretrained(resolve_model_path(TINY), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def without_speedups() -> Iterator[None]:
    """In this module's runs of the command, vectors are tried, and every kernel is compiled for its own place."""
    _active_speedups.clear()
    yield
    _active_speedups.extend(SPEEDUP_VARIABLES)


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    shortcuts = {name: os.environ[name] for name in SPEEDUP_VARIABLES if name in os.environ}
    found = ForkServer({**cli_environment(tmp_path_factory.mktemp("forks")), **shortcuts})
    yield found
    found.shutdown()


@pytest.fixture
def run_cli(tmp_path: Path, fork_server: ForkServer) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the real command in a process of its own, in a clean environment with HOME in a temporary folder.

    It is a fork of one that has imported all, where a fork can have that environment and it is not to be `new`.
    """

    def run(
        *arguments: str, timeout: float = 600, cwd: str | None = None, new: bool = False, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        environment = cli_environment(tmp_path, **environ)
        if fork_server.supports(environment) and not (new or cwd):
            return fork_server.run(*arguments, environ=environment, timeout=timeout)
        return subprocess.run(
            cli_command(*arguments), capture_output=True, text=True, timeout=timeout, env=environment, cwd=cwd
        )

    return run


def cli_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tcdeploy", *arguments]


def cli_environment(home: Path, **environ: str) -> dict[str, str]:
    kept = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    return {
        **kept,
        "HOME": str(home),
        "PYTHONPATH": PACKAGES,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **{name: os.environ[name] for name in _active_speedups if name in os.environ},
        **environ,
    }


@contextlib.contextmanager
def mounted_tmpfs(target: Path, *options: str) -> Iterator[Path]:
    """A tmpfs of one's own; skips, visibly, where mounting is not allowed."""
    target.mkdir(exist_ok=True)
    mount = subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(target)], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mount.stderr.strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)
