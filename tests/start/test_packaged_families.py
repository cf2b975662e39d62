"""Models of every supported family start from ahead-of-time packages alone, with the tokens of transformers.

What depends on the family is the export, the step program, the record and the order of the weights. Families are
therefore tested without Inductor: a package is the exported program itself, whose graph runs operation by operation.
The embedded model, a Qwen3, is compiled once (`filled_packages`), and starts in a new process in
test_packaged_start.py. With scripts/test --long, all families start, and llama (50 s of CPU time) and gpt_oss (110 s),
whose programs call our grouped GEMM, are compiled and started here. coverage/test_types.py traces further families.

The embedded model also starts on a machine that is read-only: a mount namespace in which every disk is mounted
read-only, with an empty environment.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from tcdeploy.cache.folder.layout import AOT_DIR
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.errors import CompileError
from tcdeploy.models.load import resolve_model_path
from tcdeploy.programs.packages import PackagedForward
from tcdeploy.start.prepare import prepare
from tests.conftest import PACKAGES, TINY, mounted_tmpfs
from tests.engine_loop import generate_tokens
from tests.exported_programs import exported_programs
from tests.model_families import SUPPORTED
from tests.start.test_packaged_start import (
    FLAGS,
    PROMPT,
    SCRIPT,
    aot_recipe,
    run_script,
    start,
    transformers_tokens,
)

EMBEDDED = "qwen3"
NEW_TOKENS = 12  # of `SCRIPT` and `transformers_tokens`
LAYERS: dict[str, Any] = {"num_hidden_layers": 2}
# Changes of the configs in model_families.py that leave fewer programs to compile. Only gemma3_text keeps two kinds of
# layers, of which the second is the last one; the layers of the others are all of the kind with a window.
FEWER: dict[str, dict[str, Any]] = {
    "gemma2": {**LAYERS, "layer_types": ["sliding_attention"] * 2},
    "gemma3_text": {**LAYERS, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_oss": {**LAYERS, "layer_types": ["sliding_attention"] * 2},
    "gpt2": {"n_layer": 2},
}


class Packaged(NamedTuple):
    """A model with its packages and their record."""

    model: str
    cache_dir: str
    tokens: list[int]  # of transformers


@pytest.fixture(scope="module")
def embedded(filled_packages: Path, reference_tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Packaged:
    cache = str(shutil.copytree(filled_packages, tmp_path_factory.mktemp("embedded") / "cache"))
    prepare(aot_recipe(cache))  # writes the record of a start with these options
    return Packaged(TINY, cache, transformers_tokens(reference_tiny))


def make_packages(family: str, folder: Path) -> Packaged:
    model = save_model(family, folder / "model")
    prepare(aot_recipe(str(folder / "cache"), str(folder / "model")))
    return Packaged(str(folder / "model"), str(folder / "cache"), transformers_tokens(model))


@pytest.fixture
def without_inductor() -> Iterator[None]:
    with exported_programs():
        yield


def save_model(family: str, folder: Path) -> Any:
    """Save a model with random weights, large enough that its tokens vary. Returns it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)  # no two logits are so close that rounding decides
    config = AutoConfig.for_model(family, **{**SUPPORTED[family], **FEWER.get(family, LAYERS)})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_embedding = "embed" in name or "wte" in name
            parameter.add_(torch.randn_like(parameter), alpha=0.02 if is_embedding else 0.2)
    model.save_pretrained(folder)
    return model


@pytest.mark.long  # a cold start of each; see the top of this file
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_compiled_family_starts_with_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    """The new process imports neither transformers nor a compiler. The prompt is longer than the windows."""
    packaged = make_packages(family, tmp_path)
    tokens, outcomes, imported = run_script(packaged.cache_dir, packaged.model)
    assert (outcomes, imported) == ([["hit", 0]] * 2, [])
    check_tokens(tokens, packaged)


# Two kinds of layers; a window, sinks and experts; learned positions and weights that are transposed.
ALWAYS = ("gemma3_text", "gpt_oss", "gpt2")


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in ALWAYS else pytest.mark.long)
        for family in SUPPORTED
        if family != EMBEDDED
    ],
)
def test_the_exported_programs_of_a_family_give_the_tokens_of_transformers(
    family: str, without_inductor: None, tmp_path: Path
) -> None:
    packaged = make_packages(family, tmp_path)
    deployment = start(packaged.cache_dir, packaged.model)
    assert deployment is not None and not deployment.engine.runner.has_model
    assert [(record.outcome, record.compiles) for record in deployment.records] == [("hit", 0)] * 2
    check_tokens(generate_tokens(deployment.engine, [PROMPT], SamplingParams(max_tokens=NEW_TOKENS))[0], packaged)


def check_tokens(tokens: list[int], model: Packaged) -> None:
    assert tokens == model.tokens
    assert len(set(tokens)) > 2, "the tokens depend on what was computed"


def run_read_only(command: list[str], writable: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a command with `environ` as its only variables, where at most the folder `writable` can be written."""
    if (unshare := subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True)).returncode:
        pytest.skip(f"a mount namespace is not permitted here: {unshare.stderr.strip()}")
    points = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    disks = [point for point in points if not point.startswith(("/proc", "/sys"))]
    bind = [["mount", "--bind", str(writable), str(writable)]] if writable else []
    mounts = [*bind, *(["mount", "-o", "remount,ro,bind", disk] for disk in disks)]
    run = ["exec", "env", "-i", *(f"{name}={value}" for name, value in environ.items()), *command]
    script = " && ".join(shlex.join(words) for words in [*mounts, ["cd", "/"], run])
    return subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, timeout=600)


LIST_WRITABLE = """
import json, os, sys, tempfile

def is_writable(folder):
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True

print(json.dumps([folder for folder in sys.argv[1:] if is_writable(folder)]))
print(json.dumps(sorted({*os.environ} - {"LC_CTYPE"})))  # set by Python itself
"""


def test_a_start_on_a_read_only_machine_needs_one_folder_for_temporary_files(
    embedded: Packaged, tmp_path: Path
) -> None:
    """It has no HOME, and no compiler on PATH."""
    variables = {"OMP_NUM_THREADS": "1", "PATH": "/no-programs", "TMPDIR": str(tmp_path)}
    model = str(resolve_model_path(TINY))
    folders = [embedded.cache_dir, model, "/", "/tmp", "/var/tmp", "/dev/shm", os.getcwd(), str(tmp_path)]
    machine = run_read_only([sys.executable, "-c", LIST_WRITABLE, *folders], tmp_path, **variables)
    assert machine.returncode == 0, machine.stderr
    assert [json.loads(line) for line in machine.stdout.splitlines()] == [[str(tmp_path)], sorted(variables)]
    command = [sys.executable, "-c", SCRIPT, embedded.model, embedded.cache_dir]
    started = run_read_only(command, tmp_path, **variables)
    assert started.returncode == 0, started.stderr
    assert json.loads(started.stdout) == [embedded.tokens, [["hit", 0]] * 2, []]
    assert list(tmp_path.iterdir()) == [], "the private copy of the cache folder is removed"


def test_without_a_folder_for_temporary_files_the_error_names_the_variable(embedded: Packaged) -> None:
    command = [sys.executable, "-m", "tcdeploy", "warm", TINY, *FLAGS, "--cache-dir", embedded.cache_dir]
    failed = run_read_only(command, OMP_NUM_THREADS="1", PYTHONPATH=PACKAGES)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert f"the cache folder {embedded.cache_dir} cannot be written, and no private copy can be made" in failed.stderr
    assert "set TMPDIR to a writable folder" in failed.stderr


def test_a_package_on_a_disk_without_execution_is_an_error_that_names_the_mount(
    embedded: Packaged, tmp_path: Path
) -> None:
    package = next(Path(embedded.cache_dir, AOT_DIR).glob("*/*.pt2"))
    with mounted_tmpfs(tmp_path / "disk", "-o", "noexec") as disk:
        folder = disk / AOT_DIR / "KEY"
        folder.mkdir(parents=True)
        shutil.copy(package, folder)
        plan: Any = SimpleNamespace(device="cpu", model=TINY)
        with pytest.raises(CompileError, match="cannot load the package .* is mounted with noexec") as error:
            PackagedForward({}, True, plan, folder)._load_package(package.stem)
    assert "TMPDIR if the cache folder is read-only" in error.value.hint
