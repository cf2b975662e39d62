"""Folders that a user may pass and that cannot be loaded: each error names the fact, and its hint the next command."""

from __future__ import annotations

import importlib.util
import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tcdeploy.errors import ModelError, TcdeployError
from tcdeploy.models.load import load_config, resolve_model_path
from tcdeploy.models.load_errors import missing_packages, translate_error
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.decide import decide
from tcdeploy.text.tokenizer import load_tokenizer
from tests.conftest import TINY, RunCLI

CONFIG_CODE = """
from transformers import LlamaConfig
class MyConfig(LlamaConfig):
    model_type = "mymodel"
"""
MODEL_CODE = """
from transformers import LlamaForCausalLM
from .configuration_my import MyConfig
class MyForCausalLM(LlamaForCausalLM):
    config_class = MyConfig
"""
AUTO_MAP = {"AutoConfig": "configuration_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyForCausalLM"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    return Path(shutil.copytree(resolve_model_path(TINY), tmp_path / "model"))


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def rejection(call: Callable[[], Any]) -> TcdeployError:
    with pytest.raises(TcdeployError) as error:
        call()
    assert error.value.hint
    return error.value


def plan(folder: Path, **fields: Any) -> Any:
    return decide(Recipe(model=str(folder), **fields))


# config.json


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "config.json is empty"), ("[]", "config.json is not a JSON object"),
        ("null", "config.json is not a JSON object"), ("{", "config.json is not JSON: Expecting property name"),
        ("\ufeff{}", "config.json is not JSON: Unexpected UTF-8 BOM"), ("[" * 100_000, "config.json is not JSON"),
        ('{"model_type": ["llama"]}', "config.json: model_type is ['llama']; it must be a string"),
        ('{"model_type": "llama", "auto_map": "x"}', "config.json: auto_map is 'x'; it must be an object"),
        ('{"auto_map": {"AutoConfig": "x"}}', "AutoConfig in auto_map is 'x'; it must name FILE.CLASS"),
        ('{"model_type": "llama", "quantization_config": ["gptq"]}', "quantization_config is ['gptq']; it must be an"),
        ("{}", "has no model_type"), ('{"architectures": ["LlamaForCausalLM"]}', "has no model_type"),
        ('{"model_type": "llama", "hidden_size": "abc"}', "Field 'hidden_size' expected int, got str (value: 'abc')"),
    ],
)  # fmt: skip
def test_a_broken_config_is_refused_with_its_problem(folder: Path, content: str, problem: str) -> None:
    (folder / "config.json").write_text(content)
    for load_format in ("auto", "dummy"):
        assert problem in rejection(partial(plan, folder, load_format=load_format)).message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_git_lfs_pointer_instead_of_a_file_suggests_git_lfs_pull(folder: Path, name: str) -> None:
    (folder / name).write_text("version https://git-lfs.github.com/spec/v1\n")
    error = tokenizer_rejection(folder) if "tokenizer" in name else rejection(partial(plan, folder))
    assert (error.message, error.hint) == (
        f"{folder / name} is a Git LFS pointer, not the file itself", "git lfs pull"
    )  # fmt: skip


def test_a_model_type_that_transformers_does_not_know_suggests_an_update(folder: Path) -> None:
    change_config(folder, model_type="llama99", transformers_version="99.0.0")
    error = rejection(lambda: plan(folder))
    assert f"does not know the model type llama99 of {folder}" in error.message
    assert "pip install -U transformers" in error.hint


@pytest.mark.parametrize("inner", ["8b", "snapshots/0123abc"])
def test_the_folder_above_the_model_names_the_folder_to_pass(tmp_path: Path, inner: str) -> None:
    target = tmp_path / inner
    target.mkdir(parents=True)
    (target / "config.json").write_text("{}")
    assert rejection(lambda: plan(tmp_path)).hint.endswith(f": {target}")


def test_a_url_of_the_hub_suggests_the_id() -> None:
    url = "https://huggingface.co/someone/model/tree/main"
    error = rejection(lambda: resolve_model_path(url))
    assert (error.message, error.hint) == (f"{url} is a URL, not a hub id", "pass the hub id: someone/model")


# Quantisation, see test_checkpoint.py too


@pytest.mark.parametrize("settings", [{"bits": 4}, {"quant_method": None, "load_in_4bit": True}])
def test_quantisation_without_a_method_is_refused(folder: Path, settings: dict[str, Any]) -> None:
    change_config(folder, quantization_config=settings)
    for load_format in ("auto", "dummy"):
        error = rejection(partial(plan, folder, load_format=load_format))
        assert "is quantised with an unknown method, which is not supported yet" in error.message


@pytest.mark.parametrize(
    "method",
    [
        "hqq", "eetq", "quanto", "aqlm", "vptq", "spqr", "higgs", "quark", "bitnet",
        "fp_quant",
    ],
)  # fmt: skip
def test_each_other_quantisation_method_is_refused_with_weights_and_without(folder: Path, method: str) -> None:
    change_config(folder, quantization_config={"quant_method": method, "bits": 4})
    message = f"{folder} is quantised with {method}, which is not supported yet"
    assert rejection(lambda: load_config(Recipe(model=str(folder)))).message == message
    (folder / "model.safetensors").unlink()
    for load_format in ("auto", "dummy"):
        assert rejection(partial(plan, folder, load_format=load_format)).message == message


# Modelling code of the repository


@pytest.fixture
def remote(folder: Path) -> Path:
    """The embedded model with a class of its own."""
    change_config(folder, model_type="mymodel", auto_map=AUTO_MAP)
    (folder / "configuration_my.py").write_text(CONFIG_CODE)
    (folder / "modeling_my.py").write_text(MODEL_CODE)
    return folder


def test_modelling_code_runs_only_with_the_flag(remote: Path) -> None:
    error = rejection(lambda: plan(remote))
    assert "requires modelling code from its repository" in error.message and "--trust-remote-code" in error.hint
    assert plan(remote, trust_remote_code=True).architecture.class_name == "MyForCausalLM"


@pytest.mark.parametrize("name", ["configuration_my.py", "modeling_my.py"])
def test_a_missing_code_file_is_named(remote: Path, name: str) -> None:
    (remote / name).unlink()
    error = rejection(lambda: plan(remote, trust_remote_code=True))
    assert error.message == f"{remote} lacks {name}, which auto_map of its config.json names"


@pytest.mark.parametrize("name", ["configuration_my.py", "modeling_my.py"])
@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def (:", "is not valid Python: invalid syntax (line 1)"),
        ("raise RuntimeError('boom')", "cannot be imported: RuntimeError: boom (NAME, line 1)"),
        ("\nassert False", "cannot be imported: AssertionError: AssertionError (NAME, line 2)"),
        ("from transformers import Gone", "cannot be imported: ImportError: cannot import name 'Gone'"),
        ("import transformers.gone", "cannot be imported: ModuleNotFoundError: No module named 'transformers.gone'"),
        ("import sys; sys.exit(3)", "calls sys.exit()"), ("x = 1", "NAME of PATH has no class"),
    ],
)  # fmt: skip
def test_code_that_cannot_be_imported_is_named(remote: Path, name: str, code: str, problem: str) -> None:
    (remote / name).write_text(code)
    message = rejection(lambda: plan(remote, trust_remote_code=True)).message
    assert problem.replace("NAME", name).replace("PATH", str(remote)) in message and str(remote) in message


@pytest.mark.parametrize(
    ("code", "packages", "command"),
    [
        ("import einops_\nimport timm_", "einops_ and timm_, which are not installed", "pip install einops_ timm_"),
        ("from causal_conv1d.gone import x", "causal_conv1d, which is not installed", "pip install causal-conv1d"),
        ("import importlib; importlib.import_module('gone_')", "gone_, which is not installed", "pip install gone_"),
    ],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    remote: Path, code: str, packages: str, command: str
) -> None:
    (remote / "modeling_my.py").write_text(f"{code}\n{MODEL_CODE}")
    error = rejection(lambda: plan(remote, trust_remote_code=True))
    assert error.message == f"{remote} requires {packages}" and error.hint == command


def test_a_package_that_is_imported_while_the_model_runs_is_named_too(remote: Path) -> None:
    # transformers registers a model's class for the life of the process by its config class, which equal sources share
    (remote / "configuration_my.py").write_text(f"{CONFIG_CODE}\n# another source")
    code = "    def forward(self, *_, **__):\n        __import__('gone_')\n"
    (remote / "modeling_my.py").write_text(MODEL_CODE + code)
    error = rejection(lambda: plan(remote, trust_remote_code=True))
    assert error.message == "mymodel requires gone_, which is not installed" and error.hint == "pip install gone_"


@pytest.mark.parametrize(
    ("error", "packages"),
    [
        (ImportError("X requires the PIL library but it was not found in your environment. You can install it with "
                     "pip:\n`pip install pillow`. Please note"), ["pillow"]),
        (ImportError("X requires the SentencePiece library but it was not found in your environment."),
         ["sentencepiece"]),
        (ImportError("Using mxfp4 requires Accelerate: `pip install accelerate`"), ["accelerate"]),
        (ImportError("You can install or update it with pip: `pip install --upgrade accelerate`."), ["accelerate"]),
        (ImportError("cannot import name 'x'"), []), (ValueError("No module named 'x'"), []),
        (ModuleNotFoundError("No module named 'torch.gone'"), []),
    ],
)  # fmt: skip
def test_missing_packages_are_read_from_the_messages_of_transformers(error: Exception, packages: list[str]) -> None:
    assert missing_packages([error]) == packages


# Tokenizers


def tokenizer_rejection(folder: Path) -> TcdeployError:
    return rejection(lambda: load_tokenizer(plan(folder).plan))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", ["{", "", "[]"])
def test_a_broken_tokenizer_file_is_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content)
    assert tokenizer_rejection(folder).message.startswith(f"{folder / name} is ")


def test_a_missing_tokenizer_names_its_files(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    error = tokenizer_rejection(folder)
    assert "has no tokenizer that transformers can load" in error.message and "tokenizer.json" in error.hint


def test_a_tokenizer_that_is_a_json_object_but_not_a_tokenizer_is_an_error(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    assert tokenizer_rejection(folder).message.startswith(f"the tokenizer of {folder} cannot be loaded: ")


@pytest.mark.parametrize(("package", "content"), [("sentencepiece", b"\n\x0e\n\x05"), ("tiktoken", b"IQ== 0\n")])
def test_a_tokenizer_that_needs_a_package_names_it(folder: Path, package: str, content: bytes) -> None:
    """transformers asks for tiktoken in both cases."""
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(content)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    error = tokenizer_rejection(folder)
    assert error.message == f"the tokenizer of {folder} requires {package}, which is not installed"
    assert error.hint == f"pip install {package}"


def test_a_slow_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "CTRLTokenizer"}')
    assert "has a slow tokenizer (CTRLTokenizer), which cannot stream text" in tokenizer_rejection(folder).message


def test_serve_and_generate_check_the_tokenizer_before_they_compile(folder: Path, run_cli: RunCLI) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").unlink()  # would be an error if it were loaded first
    for command in (("serve", str(folder), "--port", "0"), ("generate", str(folder), "x")):
        result = run_cli(*command, "--cache-dir", str(folder / "cache"))
        assert result.returncode == 1 and "Traceback" not in result.stderr
        assert "has no tokenizer that transformers can load" in result.stderr
        assert "compile ..." not in result.stderr


# Weights


def test_a_git_lfs_pointer_instead_of_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    error = rejection(lambda: plan(folder))
    assert error.message == f"{folder}/model.safetensors is a Git LFS pointer, not the weights"
    assert error.hint == "git lfs pull" and isinstance(error, ModelError)


def test_broken_weight_files_that_are_found_while_loading_are_named(folder: Path) -> None:
    """Those of a Hub model that is downloaded only then."""
    index = folder / "pytorch_model.bin.index.json"
    (folder / "model.safetensors").unlink()
    for content, problem in (
        ({"weight_map": {"x": "part.bin"}}, "the index of the weight files of someone/model has no metadata"),
        ({"weight_map": {"x": "part.bin"}, "metadata": {}}, "someone/model lacks part.bin"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises((KeyError, FileNotFoundError)) as error:
            AutoModelForCausalLM.from_pretrained(folder)
        translated = translate_error("someone/model", error.value)
        assert (translated.message, translated.hint) == (problem, "download the model again, with all its files")


def test_a_long_error_is_translated_at_once() -> None:
    """transformers may name each tensor of a model that does not fit, in thousands of lines."""
    lines = "\n".join(f"size mismatch for model.layers.{number}.self_attn.q_proj.weight" for number in range(1000))
    start = time.perf_counter()
    translated = translate_error("someone/model", RuntimeError(f"Error(s) in loading:\n{lines}"))
    assert translated.message.startswith("someone/model cannot be loaded: Error(s) in loading")
    assert time.perf_counter() - start < 5
