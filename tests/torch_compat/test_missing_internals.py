"""Without private names, the model starts and generates the same tokens, and the Plan reports each loss.

The names are removed in groups, and each group has one start. A group has at most one name of each stage of a start, so
that the loss of one does not hide that of another. What a loss changes besides is tested beside each name's module.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tcdeploy.planning.extras import is_installed
from tcdeploy.torch_compat.registry import INTERNALS
from tests.conftest import TINY, cli_environment
from tests.fork_server import ForkServer

HAS_TRITON = is_installed("triton")
START = """
import json
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.start.prepare import prepare
from tcdeploy.planning.recipe import build_recipe
from tests.engine_loop import generate_tokens

flags = {"model": %r, "buckets": (32,), "batch_sizes": (1,), "cache_dir": %r}
deployment = prepare(build_recipe(flags, environ={}))
decisions = [(item.name, item.value, item.reason) for item in deployment.plan.decisions if item.is_fallback]
tokens = generate_tokens(deployment.engine, [[3, 4, 5, 6]], SamplingParams(max_tokens=8))
prompt = list(range(3, 15))
scored = generate_tokens(deployment.engine, [prompt], SamplingParams(max_tokens=1, prompt_logprobs=1))
outcomes = [record.outcome for record in deployment.records]
print(json.dumps({"decisions": decisions, "tokens": tokens + scored, "outcomes": outcomes}))
"""

# How to remove each name. If torch itself needs the name, it is looked up under a name that does not exist.
DELETED = {
    "autotune cache": "from torch._inductor.runtime.autotune_cache import AutotuneCache; del AutotuneCache.create",
    "kernel timings": "from torch._inductor.runtime import benchmarking; del benchmarking.benchmarker",
    "dynamic sizes": "import torch._dynamo; del torch._dynamo.mark_dynamic",
    "dependent launch": "import triton.language; del triton.language.extra.cuda.gdc_wait",
    "Triton library keys": "import triton.runtime.build; del triton.runtime.build.platform_key",
    "HTTP limits": (
        "from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol; del HttpToolsProtocol.on_headers_complete"
    ),
}
REPLACED = {
    "prompt log-probabilities": """
from transformers import PreTrainedModel
class MovedProperty:
    def __init__(self, get): self.get = get
    def __get__(self, model, owner=None): return self if model is None else self.get(model)

PreTrainedModel.base_model = MovedProperty(PreTrainedModel.base_model.fget)
""",
    "compile counters": """
import collections
import torch._dynamo.utils
class MovedCounters(collections.UserDict):
    def __missing__(self, group):
        return self.data.setdefault(group, collections.Counter())

torch._dynamo.utils.counters = MovedCounters()
""",
}
MOVED = {
    "traced weights": ("tensors_without_storage", "MAKE_WRAPPER", "torch:Tensor.moved"),
    "compile threads": ("dynamo.compile_threads", "CONFIG", "torch._inductor.moved"),
    "input roles": ("dynamo.compile_backend", "COMPILE", "torch._inductor:moved"),
    "compile trace": ("dynamo.compile_trace", "LOGGER", "torch._logging.moved:trace_log"),
    "ahead-of-time packages": ("inductor.aot_package", "LOADER", "torch:_C.moved"),
    "dependent launch in packages": ("inductor.aot_pdl", "KERNEL_CALL", "torch._inductor.moved"),
    "package builds": ("inductor.package_builds", "COMPILER", "torch._inductor.moved"),
    "operation traces": ("dynamo.operation_trace", "EXPORTING", "torch._export.moved"),
    "compile errors": ("dynamo.compile_errors", "UNSUPPORTED", "Moved"),
    "compile refusal": ("dynamo.compile_refusal", "COMPILE_FX", "torch._inductor.moved"),
    "C++ compiler queries": ("inductor.compiler_queries", "BUILDER", "torch._inductor.moved"),
    "rotary fusion": ("dynamo.eager_input_vals", "KEY", "moved_input_vals"),
    "operation dispatch": ("dynamo.dispatch_mode", "DISPATCH_MODE", "torch.utils.moved:TorchDispatchMode"),
    "failed captures": ("failed_capture", "END_ALLOCATION", "torch:_C.moved"),
    "fake tensors": ("dynamo.fake_tensors", "FAKE_TENSOR_MODE", "torch._subclasses.moved:FakeTensorMode"),
    "attention outside of the interface": (
        "transformers.attention_setting",
        "CAN_SET",
        "transformers:PreTrainedModel.moved",
    ),
    "float32 weights": ("transformers.float32_tensors", "DTYPE_PLAN", "transformers:PreTrainedModel.moved"),
    "initialisation": ("transformers.initialization", "INITIALIZE", "transformers:PreTrainedModel.moved"),
    "kernels of experts": ("transformers.experts_interface", "DECORATOR", "transformers.integrations.moe:moved"),
    "graph cache keys": ("inductor.graph_cache_keys", "PICKLER", "torch._inductor.moved:FxGraphCachePickler"),
    "cache settings": ("inductor.settings", "CONFIG", "torch._inductor.moved"),
    "installation hashes": ("inductor.installation_hashes", "TORCH_KEY", "torch._inductor.moved:torch_key"),
    "kernel environment": ("inductor.kernel_environment", "POINTER", "torch:_C._dynamo.guards.moved"),
    "precompiled headers": ("inductor.precompiled_headers", "CODECACHE", "torch._inductor.moved"),
    "stored kernels": ("triton.stored_kernels", "COMPILED_KERNEL", "triton.compiler:Moved"),
    "asynchronous products": ("triton.gluon", "HOPPER_FUNCTIONS", "triton.experimental.moved"),
    "torch-flash attention": ("torch_flash", "OP", "torch:ops.aten.moved"),
    "transformers imports": ("transformers.fast_import", "LISTING_FUNCTION", "moved"),
    "Triton's cache": ("triton.cache", "CACHE_MANAGER", "triton.runtime.moved:FileCacheManager"),
}
AT_IMPORT = {  # read when tcdeploy is imported, so they need a new process
    "compiled call": """
from torch import nn
nn.Module.__call__ = nn.Module._call_impl
del nn.Module._compiled_call_impl
""",
    "graph passes": """
import torch._inductor.compile_fx
import torch._inductor.custom_graph_pass
del torch._inductor.custom_graph_pass.CustomGraphPass
""",
    "kernel sources": """
from triton.runtime.jit import JITFunction
[owner] = [base for base in JITFunction.__mro__ if "_unsafe_update_src" in vars(base)]
del owner._unsafe_update_src
""",
}
REMOVALS = {
    **DELETED,
    **REPLACED,
    **{
        name: f"import tcdeploy.torch_compat.{module} as module; module.{constant} = {value!r}"
        for name, (module, constant, value) in MOVED.items()
    },
    **AT_IMPORT,
}


# Groups whose loss changes what a start on a CPU does. All other names are one group, whose loss changes nothing here.
GROUPS = (
    ("precompiled headers", "prompt log-probabilities"),
    ("fake tensors", "operation dispatch", "graph cache keys", "C++ compiler queries"),
    ("dynamic sizes", "kernel environment"),
    ("compile counters",),
    ("compiled call", "kernel sources"),
    ("graph passes",),
)
# First names of the groups that are tested without `--long`. Without graph passes the model is compiled again, in a new
# process; test_custom_graph_pass.py tests their module.
ALWAYS = ("precompiled headers", "fake tensors")


class Starter:
    """Starts builtin:tiny from one filled cache folder, each time in a separate process."""

    def __init__(self, folder: Path, fork_server: ForkServer) -> None:
        self.cache_dir, self.fork_server = str(folder / "cache"), fork_server
        self.environ = cli_environment(folder)

    def start(self, removal: str = "", new_process: bool = False, cache_dir: str = "") -> dict[str, Any]:
        result = self.run(removal + "\n" + START % (TINY, cache_dir or self.cache_dir), new_process)
        assert result.returncode == 0, result.stderr
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    def run(self, script: str, new_process: bool = False, *arguments: str) -> subprocess.CompletedProcess[str]:
        if new_process or not self.fork_server.supports(self.environ):
            command = [sys.executable, "-c", script]
            return subprocess.run(command, env=self.environ, capture_output=True, text=True)
        return self.fork_server.run(*arguments, environ=self.environ, script=script)


@pytest.fixture(scope="module")
def starter(tmp_path_factory: pytest.TempPathFactory, fork_server: ForkServer, filled_cache: Path) -> Starter:
    folder = tmp_path_factory.mktemp("missing")
    shutil.copytree(filled_cache, folder / "cache")
    return Starter(folder, fork_server)


@pytest.fixture(scope="module")
def complete(starter: Starter) -> dict[str, Any]:
    """A start with every name in place."""
    answer = starter.start()
    assert answer["outcomes"] == ["hit", "hit"]
    return answer


def all_groups() -> list[tuple[str, ...]]:
    grouped = {name for group in GROUPS for name in group}
    return [*GROUPS, tuple(name for name in REMOVALS if name not in grouped)]


def with_marks(group: tuple[str, ...]) -> Any:
    return pytest.param(group, marks=() if group[0] in ALWAYS else pytest.mark.long, id=group[0].replace(" ", "-"))


def test_every_internal_has_a_removal_and_is_in_one_group() -> None:
    names = sorted(internal.name for internal in INTERNALS)
    assert sorted(REMOVALS) == names
    assert sorted(name for group in all_groups() for name in group) == names


@pytest.mark.parametrize("group", map(with_marks, all_groups()))
def test_a_start_without_them_gives_the_same_tokens_and_the_plan_says_what_is_lost(
    group: tuple[str, ...], starter: Starter, complete: dict[str, Any], tmp_path: Path
) -> None:
    removed = [item for item in INTERNALS if item.name in group and (item.package != "triton" or HAS_TRITON)]
    # Without passes every program misses. An empty folder compiles them faster, with precompiled headers.
    cache_dir = str(tmp_path) if "graph passes" in group else ""
    removal = "\n".join(REMOVALS[internal.name] for internal in removed)
    answer = starter.start(removal, any(name in AT_IMPORT for name in group), cache_dir)
    assert answer["tokens"] == complete["tokens"]
    added = [item for item in answer["decisions"] if item not in complete["decisions"]]
    assert [(name, value) for name, value, _ in added] == [(internal.name, "not available") for internal in removed]
    for internal, (_, _, reason) in zip(removed, added, strict=True):
        assert reason.startswith(f"{internal.consequence}: {internal.package} ")
        assert reason.endswith(f" moved {internal.symbol}")
    if "compile counters" in group:
        assert answer["outcomes"] == ["unknown", "unknown"]


def test_require_hit_fails_if_hits_cannot_be_counted(starter: Starter, complete: dict[str, Any]) -> None:
    flags = ("warm", TINY, "--buckets", "32", "--batch-sizes", "1", "--cache-dir", starter.cache_dir, "--require-hit")
    if not starter.fork_server.supports(starter.environ):
        pytest.skip("needs a fork that has imported torch")
    result = starter.run(REMOVALS["compile counters"], False, *flags)
    assert result.returncode == 6
    assert "cache hits cannot be counted" in result.stderr
