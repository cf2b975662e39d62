"""Shared fixtures: a warmed deployment of the embedded model, its reference in transformers, and runs of the CLI."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from filelock import FileLock

from tcdeploy.cache.folder.layout import HEADERS_DIR
from tcdeploy.host.gc_policy import relax_gc_for_startup
from tests.fork_server import HAS_GPU, ForkServer

# Set before torch is imported: test workers with several threads each would compete for the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Inductor probes six vector instruction sets by compiling and loading a library for each: 8 s in a new cache folder,
# 1 s in every process. This variable makes it trust the CPU flags.
VEC_ISA_VARIABLE = "TORCHINDUCTOR_VEC_ISA_OK"
os.environ.setdefault(VEC_ISA_VARIABLE, "1")
# A cold start is mostly g++ at 0.6 s per kernel, and many tests start the same model. compilers/g++ keeps the kernels
# of all test runs in this folder. Torch still calls a compiler.
COMPILER_CACHE_VARIABLE = "TEST_COMPILER_CACHE"
CACHE_HOME = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
COMPILER_CACHE = Path(os.environ.get(COMPILER_CACHE_VARIABLE) or CACHE_HOME / "tcdeploy-tests" / "g++")
KEEP_UNUSED_KERNELS_S = 14 * 24 * 3600
INHERITED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")
SPEEDUP_VARIABLES = (VEC_ISA_VARIABLE, COMPILER_CACHE_VARIABLE)
hypothesis.settings.register_profile("without deadlines", deadline=None)  # tests do not measure time
hypothesis.settings.load_profile("without deadlines")

RunCLI = Callable[..., subprocess.CompletedProcess[str]]
_active_speedups = list(SPEEDUP_VARIABLES)  # passed to CLI runs; `with_instruction_probes` removes one of them

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = os.pathsep.join(
    [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)  # the import path of the tests themselves
TINY = "builtin:tiny"
TINY_BUCKETS = (32, 128)
TINY_BATCH_SIZES = (1, 4)
TINY_FLAGS = ("--buckets", "32,128", "--batch-sizes", "1,4")
PACKAGE_FLAGS = ("--device", "cpu", "--buckets", "32", "--batch-sizes", "4", "--programs", "aot")
# Tests with the marker `compiles`, which `scripts/test --quick` leaves out: those that use one of these fixtures, and
# those below these paths, which compile, start a model, or run kernels in Triton's interpreter for many seconds.
COMPILING_FIXTURES = frozenset(
    {"cache_dir", "filled_cache", "filled_packages", "fork_server", "reference_tiny", "tiny_deployment", "warm_cache",
     "warmed"}
)  # fmt: skip
COMPILING_PATHS = (
    "kernels/attention/", "bench/test_measure.py", "bundle/test_relocation.py", "bundle/test_why.py",
    "cache/test_folder.py", "cache/test_source_keys.py", "programs/", "coverage/test_types.py",
    "deploy/test_docker_image.py", "doctor/test_machine_faults.py", "scale/test_ray.py", "scale/test_ray_router.py",
    "engine/test_tuning.py", "explain/test_explain.py", "gpu/", "kernels/experts/", "kernels/linear/", "kernels/state/",
    "models/test_packed_linears.py",
    "parity/", "start/test_packaged_families.py", "start/test_scheme_starts.py", "start/test_slot_packages.py",
    "start/test_hybrid_packages.py", "engine/test_hybrid_models.py", "engine/test_snapshot_models.py",
    "engine/test_reported_state_faults.py", "test_prewarm.py", "test_story.py", "torch_compat/",
)  # fmt: skip

# What scripts/test --quick leaves out besides them: these take two thirds of the time of the tests without the marker.
SLOW_PATHS = (
    "bundle/", "cache/test_manifest.py", "deploy/", "doctor/", "engine/test_abandoned_captures.py",
    "engine/test_sampling.py", "engine/test_scheduler_costs.py", "engine/test_step_size.py",
    "engine/test_stored_reference.py", "hostile/",
    "kernels/sampling/test_sample.py", "models/", "remote/", "server/test_chat_templates.py", "test_scripts.py",
    "test_sign_and_push.py",
)  # fmt: skip

# Files that take half a minute or more. They run first: otherwise the last worker runs one while the others are idle.
LONG_FILES = (
    "engine/test_hybrid_models.py", "engine/test_slot_state.py", "engine/test_snapshot_models.py",
    "engine/test_reported_state_faults.py", "server/test_hybrid_server.py", "start/test_slot_packages.py",
    "start/test_hybrid_packages.py", "parity/test_state_faults.py", "parity/test_hybrid_faults.py",
    "start/test_packaged_start.py", "start/test_parallel_compile.py", "scale/test_ray.py", "scale/test_ray_router.py",
    "programs/test_programs.py",
    "bundle/test_why.py", "coverage/test_types.py", "server/test_eager_start.py", "server/test_faults.py",
    "start/test_packaged_families.py", "start/test_scheme_starts.py", "programs/test_export.py",
    "engine/test_tuning.py", "cache/test_folder.py",
    "parity/test_planted_faults.py", "server/test_openapi.py", "test_prewarm.py", "bundle/test_relocation.py",
    "deploy/test_docker_image.py", "cache/test_source_keys.py", "models/test_load.py",
    "torch_compat/test_missing_internals.py", "kernels/attention/test_decode.py",
    "programs/passes/test_last_token_rows.py", "explain/test_explain.py", "server/test_served_cache.py",
    "hostile/test_factors.py", "engine/test_continuous_batching.py", "hostile/test_kills.py", "programs/test_aot.py",
    "cache/test_compiler.py", "cli/test_cli_bench.py", "kernels/sampling/test_sample.py", "engine/test_step_batch.py",
)  # fmt: skip

relax_gc_for_startup()  # as the CLI does
# A shell ignores SIGINT in the commands that it runs in the background, and so would all processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests with the marker `long`")
    parser.addoption("--quick", action="store_true", help="run only tests that need no compiler and little time")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --quick, do not even import the files that are left out as a whole."""
    path = relative_path(collection_path)
    return True if config.getoption("--quick") and path.startswith((*COMPILING_PATHS, *SLOW_PATHS)) else None


@functools.cache
def relative_path(path: Path) -> str:
    """Relative to tests/, "" for folders."""
    return "" if path.is_dir() else path.relative_to(ROOT / "tests").as_posix()


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Move long files to the front, mark tests that compile or start a model, and skip GPU tests if there is no GPU."""
    if not config.getoption("--long"):
        long_items = {item: None for item in items if item.get_closest_marker("long")}
        config.hook.pytest_deselected(items=list(long_items))
        items[:] = [item for item in items if item not in long_items]
    paths = {item: relative_path(item.path) for item in items}
    items.sort(key=lambda item: LONG_FILES.index(paths[item]) if paths[item] in LONG_FILES else len(LONG_FILES))
    for item in items:
        path = paths[item]
        if path.startswith(COMPILING_PATHS) or COMPILING_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.compiles)
    if config.getoption("--quick"):
        compiling = [item for item in items if item.get_closest_marker("compiles")]
        config.hook.pytest_deselected(items=compiling)
        items[:] = [item for item in items if not item.get_closest_marker("compiles")]
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder that all workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def caching_compiler() -> None:
    """Put the caching g++ first on PATH for all processes of this run. Workers share its cache."""
    if shutil.which("g++") is None:
        return
    COMPILER_CACHE.mkdir(parents=True, exist_ok=True)
    os.environ[COMPILER_CACHE_VARIABLE] = str(COMPILER_CACHE)
    os.environ["PATH"] = f"{ROOT / 'tests' / 'compilers'}{os.pathsep}{os.environ['PATH']}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Remove compiled kernels that no run has used for two weeks."""
    if "PYTEST_XDIST_WORKER" in os.environ or not COMPILER_CACHE.is_dir():
        return
    for entry in os.scandir(COMPILER_CACHE):
        with contextlib.suppress(FileNotFoundError):  # another run has removed it
            if time.time() - entry.stat().st_mtime > KEEP_UNUSED_KERNELS_S:
                os.unlink(entry.path)


@pytest.fixture(scope="session", autouse=True)
def certificates_are_loaded_once() -> None:
    """httpx loads them for each client and each call of `httpx.get`, which takes 25 ms of CPU time."""
    from httpx._transports import default as transports

    transports.create_ssl_context = functools.cache(transports.create_ssl_context)


@pytest.fixture(scope="session", autouse=True)
def noted_unfreezing() -> None:
    """Note when objects are no longer frozen. `gc.get_freeze_count` would visit all of them."""
    unfreeze = gc.unfreeze

    def note_and_unfreeze() -> None:
        _are_frozen.clear()
        unfreeze()

    gc.unfreeze = note_and_unfreeze


_are_frozen: set[bool] = set()  # {True} while the objects that existed before a test are frozen


@pytest.fixture(autouse=True)
def relaxed_collector() -> None:
    """Freeze the objects of imports and of earlier tests, and collect rarely, also after a test has ended a start.

    `release_memory` collects all objects twice, which takes 2 s in a process that has imported all tests. No garbage is
    frozen here, since `release_memory` has collected it.
    """
    relax_gc_for_startup()
    if not _are_frozen:
        gc.freeze()
        _are_frozen.add(True)


@pytest.fixture(autouse=True)
def precompiled_headers() -> None:
    """Re-enable Inductor's precompiled headers, which a warm start in this process disables.

    Without them, kernels of a test that starts no deployment would take twice as long to compile.
    """
    if "torch._inductor.codecache" in sys.modules:
        from tcdeploy.torch_compat.inductor.precompiled_headers import use_precompiled_headers

        use_precompiled_headers(True)


def remove_headers(cache: Path) -> None:
    """Remove the precompiled headers of a cache folder, 156 MB, so that tests do not copy them."""
    shutil.rmtree(cache / HEADERS_DIR, ignore_errors=True)


@pytest.fixture(scope="session")
def filled_cache(tmp_path_factory: pytest.TempPathFactory, run_cli_in: RunCLI) -> Path:
    """A cache folder with the buckets of the embedded model, filled once for all workers. Tests use copies of it."""
    return fill_once(tmp_path_factory, run_cli_in, "filled", (*TINY_FLAGS, "--programs", "jit"))


@pytest.fixture(scope="session")
def filled_packages(tmp_path_factory: pytest.TempPathFactory, run_cli_in: RunCLI) -> Path:
    """As `filled_cache`, with the ahead-of-time packages of one prefill and one decode bucket."""
    return fill_once(tmp_path_factory, run_cli_in, "packages", PACKAGE_FLAGS)


def fill_once(tmp_path_factory: pytest.TempPathFactory, run_cli_in: RunCLI, name: str, flags: tuple[str, ...]) -> Path:
    """A cache folder that one worker fills while the others wait."""
    folder = shared_folder(tmp_path_factory) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            home = tmp_path_factory.mktemp("filler")
            done = run_cli_in(home, "warm", TINY, *flags, "--cache-dir", f"{folder}.partial")
            assert done.returncode == 0, done.stderr
            remove_headers(Path(f"{folder}.partial"))
            os.rename(f"{folder}.partial", folder)
    return folder


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> str:
    """One compile cache for all in-process tests: torch reads its location once per process."""
    if HAS_GPU:  # most GPU tests start other models
        return str(tmp_path_factory.mktemp("cache"))
    filled_cache = request.getfixturevalue("filled_cache")
    return str(shutil.copytree(filled_cache, tmp_path_factory.mktemp("cache") / "cache"))


_deployments: dict[str, Any] = {}


def reset_programs() -> None:
    """Reset torch's compiled programs, so that counts start at zero. Earlier deployments can no longer run."""
    import torch

    torch._dynamo.reset()
    _deployments.clear()


def _is_kept_until_a_reset(_: object) -> None:
    """A callback of Dynamo that does nothing. torch.compiler.reset() removes it together with all programs."""


@pytest.fixture
def tiny_deployment(cache_dir: str) -> Any:
    """The embedded model, warmed once per session, and again from the cache after `reset_programs`."""
    return prepare_tiny(cache_dir)


def prepare_tiny(cache_dir: str, **flags: Any) -> Any:
    """The embedded model prepared with additional flags, once per set of flags."""
    from torch._dynamo.callback import callback_handler

    from tcdeploy.planning.recipe import build_recipe
    from tcdeploy.start.prepare import prepare

    if _is_kept_until_a_reset not in callback_handler.start_callbacks:
        _deployments.clear()  # a test has called torch.compiler.reset(), for example by `release_memory`
        callback_handler.register_start_callback(_is_kept_until_a_reset)
    key = repr(sorted(flags.items()))
    if key not in _deployments:
        defaults = {"model": TINY, "buckets": TINY_BUCKETS, "batch_sizes": TINY_BATCH_SIZES, "cache_dir": cache_dir}
        _deployments[key] = prepare(build_recipe({**defaults, **flags}, environ={}), needs_model=True)
    return _deployments[key]


@pytest.fixture
def fresh_deployment(cache_dir: str) -> Any:
    """The embedded model, warmed after a reset: its records count all programs, also if an earlier test had them."""
    reset_programs()
    return prepare_tiny(cache_dir)


@pytest.fixture
def llm(tiny_deployment: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An `LLM` with that deployment. It must not be closed."""
    from tcdeploy.llm import llm as llm_module

    monkeypatch.setattr(llm_module, "prepare", lambda *_, **__: tiny_deployment)
    return llm_module.LLM(TINY)


@pytest.fixture(scope="session")
def reference_tiny() -> Any:
    """The same weights, loaded by plain transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    from tcdeploy.models.load import resolve_model_path

    return AutoModelForCausalLM.from_pretrained(resolve_model_path(TINY), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def with_instruction_probes() -> Iterator[None]:
    """CLI runs of this module probe vector instructions, as on a user's machine. Kernels still come from the cache."""
    _active_speedups.remove(VEC_ISA_VARIABLE)
    yield
    _active_speedups.append(VEC_ISA_VARIABLE)


@pytest.fixture(scope="session")
def fork_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    speedups = {name: os.environ[name] for name in SPEEDUP_VARIABLES if name in os.environ}
    server = ForkServer({**cli_environment(tmp_path_factory.mktemp("forks")), **speedups})
    yield server
    server.shutdown()


@pytest.fixture(scope="session")
def run_cli_in(fork_server: ForkServer) -> RunCLI:
    """Run the CLI in a separate process, in a clean environment with the given folder as HOME.

    The process is a fork of one that has imported everything, unless the environment rules that out or `new` is set.
    """

    def run(
        home: Path, *arguments: str, timeout: float = 600, cwd: str | None = None, new: bool = False, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        environment = cli_environment(home, **environ)
        if not new and fork_server.supports(environment):
            return fork_server.run(*arguments, environ=environment, timeout=timeout, cwd=cwd)
        return subprocess.run(
            cli_command(*arguments), capture_output=True, text=True, timeout=timeout, env=environment, cwd=cwd
        )

    return run


@pytest.fixture
def run_cli(tmp_path: Path, run_cli_in: RunCLI) -> RunCLI:
    """`run_cli_in` with the temporary folder of the test as HOME."""
    return functools.partial(run_cli_in, tmp_path)


def cli_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "tcdeploy", *arguments]


def cli_environment(home: Path, **environ: str) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
    return {
        **inherited,
        "HOME": str(home),
        "PYTHONPATH": PACKAGES,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **{name: os.environ[name] for name in _active_speedups if name in os.environ},
        **environ,
    }


@contextlib.contextmanager
def mounted_tmpfs(target: Path, *options: str) -> Iterator[Path]:
    """Mount a tmpfs at `target`. Skips the test if mounting is not allowed."""
    target.mkdir(exist_ok=True)
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "mode=700", *options, "tmpfs", str(target)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mount.stderr.strip()}")
    try:
        yield target
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)
