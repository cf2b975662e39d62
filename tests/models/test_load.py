"""Loading models, and each way in which it fails: a clear error, an exit code and the next command."""

from __future__ import annotations

import http.server
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoConfig

from tcdeploy.errors import ARCHITECTURE_HINT, UnsupportedModelError
from tcdeploy.models import load
from tcdeploy.models.hub import RETRY_WAITS_S
from tcdeploy.models.load import MAX_LAYERS, load_config
from tcdeploy.models.location import BUILTIN_MODELS
from tcdeploy.models.weights import checkpoint
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.decide import decide
from tcdeploy.text.generation_config import read_generation_config
from tcdeploy.text.tokenizer import load_tokenizer
from tests.conftest import TINY_FLAGS, cli_environment
from tests.fork_server import ForkServer
from tests.formats import fp8
from tests.formats.checkpoint import save_source, write_checkpoint
from tests.model_families import save_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"
UNREACHABLE = "http://127.0.0.1:9"  # the discard port: connections are refused
WARM = ("--buckets", "16", "--batch-sizes", "1", "--programs", "jit")


class _FakeHub(http.server.BaseHTTPRequestHandler):
    """Rejects requests as the real Hub does, with status and X-Error-Code. Some repositories exist."""

    rejections = {"gated": (403, "GatedRepo"), "missing": (401, "RepoNotFound")}
    repositories = {
        "someone/lora": ("README.md", "adapter_config.json", "adapter_model.safetensors"),
        "someone/llama-gguf": ("README.md", "llama-Q4_K_M.gguf", "llama-Q8_0.gguf"),
        "someone/readme": ("README.md",),
    }
    adapter_config = b'{"base_model_name_or_path": "someone/base"}'

    def do_GET(self) -> None:
        for name, files in self.repositories.items():
            if self.path.startswith(f"/api/models/{name}"):
                siblings = [{"rfilename": file} for file in files]
                return self.send_file(json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())
            if self.path.startswith(f"/{name}/"):
                is_adapter_config = self.path.endswith("/adapter_config.json") and "adapter_config.json" in files
                return self.send_file(self.adapter_config) if is_adapter_config else self.reject(404, "EntryNotFound")
        kind = next(kind for kind in self.rejections if kind in self.path)
        return self.reject(*self.rejections[kind])

    def send_file(self, content: bytes) -> None:
        self.send_response(200)
        for header, value in (("X-Repo-Commit", COMMIT), ("ETag", '"1"'), ("Content-Length", str(len(content)))):
            self.send_header(header, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def reject(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", f"{code} says the hub")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def run_online(run_cli: Any, fork_server: ForkServer, tmp_path: Path) -> Any:
    """Runs the CLI against a Hub at `endpoint`.

    huggingface_hub reads HF_ENDPOINT during import, which a fork shares, so the script sets its constants.
    """

    def run(*arguments: str, endpoint: str) -> Any:
        environ = cli_environment(tmp_path)
        if not fork_server.supports(environ):
            return run_cli(*arguments, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="0")
        script = (
            "from huggingface_hub import constants; from huggingface_hub.utils import _http; "
            f"constants.ENDPOINT, constants.HF_HUB_OFFLINE = {endpoint!r}, False; "
            "constants.HUGGINGFACE_CO_URL_TEMPLATE = constants.ENDPOINT + '/{repo_id}/resolve/{revision}/{filename}'; "
            # time.sleep of the whole process: huggingface_hub would wait for 23 s between its retries
            "_http.time.sleep = lambda seconds: None"
        )
        return fork_server.run(*arguments, environ=environ, script=script)

    return run


def assert_fails(result: Any, code: int, *texts: str) -> None:
    assert result.returncode == code, result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith(("error:", "hint:"))]
    assert len(lines) == 2, result.stderr
    for text in texts:
        assert text in "\n".join(lines), result.stderr


def test_a_gated_model_is_an_error_with_the_login_command(run_cli: Any, hub: str) -> None:
    result = run_cli("warm", "someone/gated-8b", HF_ENDPOINT=hub, HF_HUB_OFFLINE="0")
    assert_fails(result, 1, "someone/gated-8b is gated", "hf auth login")


def test_a_missing_model_is_an_error(run_online: Any, hub: str) -> None:
    result = run_online("warm", "someone/missing-8b", endpoint=hub)
    assert_fails(result, 2, "the hub has no model someone/missing-8b, or it is private")


@pytest.mark.parametrize(
    ("model", "fact", "hint"),
    [
        ("someone/lora", "contains a PEFT adapter for someone/base, which is not supported", "merge_and_unload()"),
        ("someone/llama-gguf", "has weights in the format GGUF, and no config.json", "download one of its"),
        ("someone/readme", "has no config.json on the hub", "in transformers' format"),
    ],
)  # fmt: skip
def test_a_repository_without_a_config_is_named_by_what_it_contains(
    run_online: Any, run_cli: Any, hub: str, model: str, fact: str, hint: str
) -> None:
    for flags in (("--dry-run",), ("--load-format", "dummy"), ()):
        result = run_online("warm", model, *flags, endpoint=hub)
        assert_fails(result, 1, f"error: {model} {fact}", hint)
    if model == "someone/lora":  # its config has been cached
        assert_fails(run_cli("warm", model), 1, f"error: {model} {fact}", hint)


def test_no_network_is_exit_code_8_and_one_error(run_cli: Any, run_online: Any) -> None:
    """huggingface_hub would write two lines for each of six attempts, for each file."""
    result = run_online("warm", "someone/model", endpoint=UNREACHABLE)
    assert_fails(result, 8, "the hub cannot be reached", "builtin:tiny")
    others = [line for line in result.stderr.splitlines() if not line.startswith(("error:", "hint:"))]
    assert [line.split()[0] for line in others] == ["import", "decide"], "the stages"
    assert_fails(run_cli("warm", "someone/model"), 8, "the hub cannot be reached")


def test_without_a_network_a_downloaded_model_is_read_after_one_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """huggingface_hub would wait for 23 s for each file that a model need not have, and that is not in its cache."""
    repository, waits = tmp_path / "models--someone--offline", list[float]()
    shutil.copytree(BUILTIN_MODELS["builtin:tiny"], repository / "snapshots" / COMMIT)
    (repository / "snapshots" / COMMIT / "generation_config.json").unlink()
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", UNREACHABLE + "/{repo_id}/{revision}/{filename}")
    monkeypatch.setattr(constants, "ENDPOINT", UNREACHABLE)
    monkeypatch.setattr(time, "sleep", waits.append)
    recipe = Recipe(model="someone/offline")
    assert load_config(recipe).model_type == "llama"
    assert load_tokenizer(recipe).is_fast
    file = read_generation_config(recipe.model, None)
    assert file is not None and not file.is_downloaded
    assert waits == list(RETRY_WAITS_S)
    [warning] = [record.getMessage() for record in caplog.records if record.name.startswith("tcdeploy")]
    assert warning.startswith("cannot reach the Hub (") and "HF_HUB_OFFLINE=1 skips" in warning


def test_the_weights_of_a_quantised_model_are_downloaded_by_the_plan_but_not_in_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tensors say which layers are quantised."""
    source = write_fp8_model(tmp_path / "files")
    snapshot = tmp_path / "models--someone--fp8" / "snapshots" / COMMIT
    shutil.copytree(source, snapshot, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "models--someone--fp8/refs").mkdir()
    (tmp_path / "models--someone--fp8/refs/main").write_text(COMMIT)
    requested: list[Any] = []

    def download(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        requested.append((model, revision, allow_patterns))
        shutil.copy(source / "model.safetensors", snapshot)
        return str(snapshot)

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(checkpoint, "uses_local_files_only", lambda *_: False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=[]))
    monkeypatch.setattr(load, "_read_config", lambda *_: AutoConfig.from_pretrained(source))
    recipe = Recipe(model="someone/fp8", buckets=(16,), batch_sizes=(1,), context=64)
    [finding] = [item for item in decide(recipe, is_dry_run=True).findings if item.name == "weights"]
    assert "are not downloaded yet" in finding.message and requested == []
    planned = decide(recipe)
    assert requested == [("someone/fp8", None, ["model*.safetensors", "model.safetensors.index.json"])]
    assert planned.architecture.schemes == {"fp8_block": 14} and planned.traced_model is not None


def write_fp8_model(folder: Path) -> Path:
    write_checkpoint(fp8.FORMATS["deepseek"], save_source(folder / "source"), folder / "fp8")
    return folder / "fp8"


def test_a_folder_without_a_config_is_not_a_model(run_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_fails(run_cli("warm", str(tmp_path / "empty")), 1, "is not a model: it has no config.json")


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (("builtin:huge",), "unknown builtin model builtin:huge"),
        (("./absent",), "folder ./absent does not exist"),
        (("https://huggingface.co/someone/model",), "is a URL, not a hub id"),
        (("some one",), "some one is neither a local folder nor a hub id"),
        (("--recipe", "huge"), "no recipe is called 'huge'"),
        (("--recipe", "absent.yaml"), "recipe file absent.yaml does not exist"),
    ],
)
def test_a_name_that_names_nothing_is_exit_code_2(run_cli: Any, arguments: tuple[str, ...], fact: str) -> None:
    assert_fails(run_cli("warm", *arguments), 2, fact)


def test_a_broken_config_is_an_error_without_traceback(run_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{ not json")
    assert_fails(run_cli("warm", str(tmp_path)), 1, f"{tmp_path}/config.json is not JSON")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "abc"}))
    assert_fails(run_cli("warm", str(tmp_path)), 1, f"{tmp_path} cannot be loaded")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody-knows-it"}))
    assert_fails(run_cli("warm", str(tmp_path)), 1, "the model type nobody-knows-it", "pip install -U transformers")


def test_a_config_without_weights_suggests_dummy_weights(run_cli: Any, tmp_path: Path) -> None:
    folder = save_config("llama", tmp_path)
    assert_fails(run_cli("warm", folder, *WARM, "--cache-dir", str(tmp_path / "cache")), 1, "--load-format dummy")


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("t5", "is an encoder-decoder model (t5)"), ("bart", "is an encoder-decoder model (bart)"),
        ("whisper", "is an encoder-decoder model (whisper)"), ("vit", "is not a causal LM"),
        ("clip", "is a multimodal model (clip)"),
    ],
)  # fmt: skip
def test_another_kind_of_model_is_named(model_type: str, reason: str, tmp_path: Path) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as error:
        load_config(Recipe(model=str(tmp_path), load_format="dummy"))
    assert reason in error.value.message and error.value.hint == ARCHITECTURE_HINT


def test_an_unsupported_model_is_an_error_on_the_command_line(run_cli: Any, tmp_path: Path) -> None:
    folder = save_config("bloom", tmp_path)
    assert_fails(run_cli("warm", folder, "--load-format", "dummy"), 1, "cannot be served, for 3 reasons")


def test_a_model_larger_than_memory_is_exit_code_7(run_cli: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16384, "num_hidden_layers": 200, "num_attention_heads": 128, "intermediate_size": 53248}
    folder = save_config("llama", tmp_path, **sizes)
    assert_fails(run_cli("warm", folder, "--load-format", "dummy"), 7, "weights leave no memory for KV")


def test_a_checkpoint_without_one_layer_is_an_error(run_cli: Any, tmp_path: Path) -> None:
    """transformers would initialise the missing weights at random, and the parity check would pass."""
    from safetensors.torch import load_file, save_file

    from tcdeploy.models.load import resolve_model_path

    folder = tmp_path / "holed"
    shutil.copytree(resolve_model_path("builtin:tiny"), folder)
    tensors = load_file(folder / "model.safetensors")
    partial = {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}
    assert len(partial) < len(tensors)
    save_file(partial, folder / "model.safetensors", metadata={"format": "pt"})
    result = run_cli("warm", str(folder), *WARM, "--cache-dir", str(tmp_path / "cache"))
    assert_fails(result, 1, f"lacks {len(tensors) - len(partial)} of the model's tensors", "model.layers.1.")


def test_weights_are_loaded_from_a_local_folder(run_cli: Any, filled_cache: Path, tmp_path: Path) -> None:
    """Greedy text from a folder that transformers saved equals generate() with the same weights.

    The programs are those of the embedded model, whose weights differ.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tcdeploy.models.load import resolve_model_path

    source = resolve_model_path("builtin:tiny")
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32),
        AutoTokenizer.from_pretrained(source),
    )
    torch.manual_seed(1)
    with torch.no_grad():
        model.model.norm.weight.mul_(1.0 + 0.5 * torch.rand_like(model.model.norm.weight))
    model.save_pretrained(tmp_path / "mine")
    tokenizer.save_pretrained(tmp_path / "mine")
    prompt = "The list of arguments"
    ids = tokenizer(prompt, return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids.input_ids.shape[1] :]
    shutil.copytree(filled_cache, tmp_path / "cache")
    flags = (*TINY_FLAGS, "--programs", "jit", "--cache-dir", str(tmp_path / "cache"))
    result = run_cli("generate", str(tmp_path / "mine"), prompt, "--max-new-tokens", "12", *flags)
    assert result.returncode == 0, result.stderr
    assert result.stdout == tokenizer.decode(expected, skip_special_tokens=True) + "\n"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.7},
        pytest.param({"rope_type": "dynamic", "factor": 2.0}, marks=pytest.mark.long),
        pytest.param(
            {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 2.0,
             "short_factor": [1.0 + 0.1 * i for i in range(16)], "long_factor": [3.0] * 16},
            marks=pytest.mark.long,
        ),
    ],
)  # fmt: skip
def test_rope_that_changes_with_the_length_is_served_up_to_its_original_length(
    run_cli: Any, tmp_path: Path, rope: dict[str, Any]
) -> None:
    """Greedy text up to the last position equals that of transformers; a longer context is refused."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tcdeploy.models.load import resolve_model_path

    folder = tmp_path / "rope"
    shutil.copytree(resolve_model_path("builtin:tiny"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_theta": 10000.0, **rope}
    config["max_position_embeddings"] = 64 if rope["rope_type"] == "dynamic" else 128
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = "The list of arguments"
    ids = tokenizer(prompt, return_tensors="pt")
    length = 64 - ids.input_ids.shape[1]
    expected = model.generate(**ids, max_new_tokens=length, do_sample=False)[0, ids.input_ids.shape[1] :]
    flags = (*WARM, "--cache-dir", str(tmp_path / "cache"))
    result = run_cli("generate", str(folder), prompt, "--max-new-tokens", str(length), *flags)
    assert result.returncode == 0, result.stderr
    assert result.stdout == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert_fails(run_cli("warm", str(folder), *flags, "--context", "65"), 2, "context 65 is not between 2 and 64")


@pytest.mark.parametrize(
    ("model_type", "layers", "values"),
    [
        ("llama", 513, {"num_hidden_layers": 513}),
        ("qwen3", 10**9, {"num_hidden_layers": 10**9}),  # transformers makes a list with an entry per layer
        ("gpt2", 10**7, {"n_layer": 10**7}),
        ("gemma3", 10**7, {"text_config": {"model_type": "gemma3_text", "num_hidden_layers": 10**7}}),
    ],
)
def test_a_config_with_more_layers_than_can_be_planned_is_refused_by_their_number(
    model_type: str, layers: int, values: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **values}))
    with pytest.raises(UnsupportedModelError, match=f"has {layers} layers; at most {MAX_LAYERS} are supported"):
        load_config(Recipe(model=str(tmp_path)))


def test_the_deepest_published_models_can_be_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 126}))
    assert load_config(Recipe(model=str(tmp_path))).num_hidden_layers == 126
