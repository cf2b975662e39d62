"""Hostile model folders: configs with random edits, and damaged weights. Each is planned for, or refused with a hint.

Each attack runs in a fork, with limits of time and memory: an endless loop or an exhausted memory is a success of the
attack, and so is any exception other than TcdeployError. Folders with weights are also loaded if they are planned for.
"""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import tempfile
from collections import Counter
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tcdeploy.errors import TcdeployError
from tcdeploy.models.load import resolve_model_path
from tcdeploy.models.load_model import load_model
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.decide import decide
from tests.model_families import SHAPE_ONLY, SUPPORTED, UNSUPPORTED

DEFAULT_COUNT = 1000
TIME_LIMIT_S = 60
MEMORY_LIMIT_BYTES = 3 << 30  # of addresses, besides those that a fork has when it starts
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 2**15, 2**31, 2**63, 10**30, -(2**40), 0.0, 0.5, -1.5, 1e300, float("nan"),
    float("inf"), "", "x", "auto", "float16", "int8", "../../etc/passwd", "a" * 5000, [], [1], ["x"], [None] * 9,
    {}, {"x": 1}, {"rope_type": "longrope"}, {"rope_type": "dynamic", "factor": 2.0}, {"": []}, [[[]]], [{}],
]  # fmt: skip
INDEX_KEYS = ("", "model", "../x", "model.layers.99.mlp.up_proj.weight", "a" * 5000, "\0")
INDEX_TARGETS: list[Any] = [
    *VALUES, "../model-00001-of-00002.safetensors", "/etc/passwd", "/dev/zero", "config.json", "gone.safetensors", ".",
    "..", "model-00001-of-00002.safetensors/", "./model-00001-of-00002.safetensors", "sub/part.safetensors", "\0",
    "model-00002-of-00002.safetensors", "~/x.safetensors", "https://example.com/x.safetensors", "a\nb.safetensors",
]  # fmt: skip
GENERATION_KEYS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens", "do_sample", "eos_token_id",
    "pad_token_id", "num_beams", "cache_implementation", "suppress_tokens", "early_stopping", "transformers_version",
)  # fmt: skip
ADDED_KEYS = (
    "layer_types", "rope_parameters", "rope_scaling", "sliding_window", "quantization_config", "auto_map", "dtype",
    "text_config", "model_type", "architectures", "torch_dtype", "num_labels", "id2label", "is_encoder_decoder",
    "attn_implementation", "_attn_implementation", "tie_word_embeddings", "transformers_version", "hidden_act",
    "head_dim", "max_position_embeddings", "use_cache", "pruned_heads", "base_model_tp_plan", "sub_configs",
)  # fmt: skip


def families() -> dict[str, dict[str, Any]]:
    return {**SUPPORTED, **SHAPE_ONLY, **{name: sizes for name, (sizes, _) in UNSUPPORTED.items()}}


def edit(config: dict[str, Any], source: random.Random) -> None:
    """Change, remove or add one to three keys of a config, or of a dict in it."""
    for _ in range(source.randint(1, 3)):
        nested = [config, *(value for value in config.values() if isinstance(value, dict))]
        part = source.choice(nested) if source.random() < 0.3 else config
        existing = [source.choice(list(part))] if part else []
        key = source.choice([*existing, *existing, source.choice(ADDED_KEYS)])
        if source.random() < 0.1:
            part.pop(key, None)
        else:
            part[key] = copy.deepcopy(source.choice(VALUES))


def config_only(folder: Path, source: random.Random) -> str:
    """A folder with an edited config of a random family."""
    family = source.choice(sorted(families()))
    config = AutoConfig.for_model(family, **families()[family]).to_dict()
    edit(config, source)
    (folder / "config.json").write_text(json.dumps(config))
    return "dummy"


def config_text(folder: Path, source: random.Random) -> str:
    """A folder whose config.json is damaged, or is not an object."""
    content = bytearray(Path(resolve_model_path("builtin:tiny"), "config.json").read_bytes())
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(content))
        content[at : at + source.randrange(9)] = source.choice([b"\xff", b"[" * 3000, b"{", b'"', b"1e999", b""])
    whole = source.choice([b"", b"[]", b"null", b'"x"', b"[" * 100_000, b"{}", bytes(content), bytes(content)])
    (folder / "config.json").write_bytes(whole)
    return "dummy"


def with_weights(folder: Path, source: random.Random) -> str:
    """The embedded model with an edited config."""
    shutil.copytree(resolve_model_path("builtin:tiny"), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    edit(config, source)
    (folder / "config.json").write_text(json.dumps(config))
    return "auto"


def damaged_weights(folder: Path, source: random.Random) -> str:
    """The embedded model with random bytes in the header of its weights, or with a hostile index."""
    shutil.copytree(resolve_model_path("builtin:tiny"), folder, dirs_exist_ok=True)
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    if source.random() < 0.5:
        for _ in range(source.randint(1, 4)):
            content[source.randrange(3000)] = source.randrange(256)
        weights.write_bytes(content[: source.choice([len(content), len(content), source.randrange(5000)])])
    else:
        weights.rename(folder / "part.safetensors")  # transformers prefers model.safetensors to an index
        value = source.choice([*VALUES, "part.safetensors", "gone.safetensors", "config.json"])
        index = source.choice([value, {"weight_map": value}, {"weight_map": {"model.norm.weight": value}}])
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return "auto"


def edited_index(folder: Path, source: random.Random) -> str:
    """The embedded model in two shards, with an index that is edited in one to three places."""
    shutil.copytree(resolve_model_path("builtin:tiny"), folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, files = sorted(tensors), ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for file, part in zip(files, (names[::2], names[1::2]), strict=True):
        save_file({name: tensors[name] for name in part}, folder / file, metadata={"format": "pt"})
    weight_map: Any = {name: files[number % 2] for number, name in enumerate(names)}
    index: Any = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    for _ in range(source.randint(1, 3)):
        name, target = source.choice(names), source.choice(INDEX_TARGETS)
        kind = source.choice(["target", "target", "remove", "swap", "add", "key", "all", "metadata", "value"])
        if kind in ("target", "add", "key"):
            weight_map[{"target": name, "add": "model.extra.weight", "key": source.choice(INDEX_KEYS)}[kind]] = target
        elif kind == "remove":
            weight_map.pop(name, None)
        elif kind == "swap":
            weight_map[name] = files[1 - files.index(weight_map.get(name))] if weight_map.get(name) in files else target
        elif kind == "all":
            weight_map.update(dict.fromkeys(names, target))
        elif kind == "metadata":
            index["metadata"] = copy.deepcopy(source.choice(VALUES))
        else:
            index = source.choice([{"weight_map": copy.deepcopy(source.choice(VALUES))}, {"metadata": {}}, index])
    text = json.dumps(index)
    if source.random() < 0.15:
        at = source.randrange(len(text))
        text = source.choice([text[:at], text[:at] + source.choice('"{[,') + text[at:], f"{text}{text}", ""])
    (folder / "model.safetensors.index.json").write_text(text)
    return "auto"


def generation_config(folder: Path, source: random.Random) -> str:
    """The embedded model with random sampling defaults and end-of-sequence ids, or a damaged file of them."""
    shutil.copytree(resolve_model_path("builtin:tiny"), folder, dirs_exist_ok=True)
    text = json.dumps({key: source.choice(VALUES) for key in source.sample(GENERATION_KEYS, source.randint(1, 3))})
    text = source.choice([text, text, text, text[: source.randrange(len(text))], "[]", "[" * 100_000])
    (folder / "generation_config.json").write_text(text)
    return "auto"


ATTACKS = (config_only, config_only, with_weights, config_text, damaged_weights, edited_index, generation_config)


def has_weights_of_shards(model: Any, folder: Path) -> bool:
    """Whether a model has the values of all tensors in the shards of a folder, if there are any."""
    shards = [load_file(path) for path in folder.glob("model-*.safetensors")]
    tensors = ((attrgetter(name)(model), value) for shard in shards for name, value in shard.items())
    return all(tensor.equal(value.to(tensor.dtype)) for tensor, value in tensors)


def attempt(folder: Path, load_format: Any) -> str:
    """Plan, and load the weights if there are any. Returns "planned", "loaded", "refused" or what went wrong."""
    recipe = Recipe(model=str(folder), load_format=load_format, buckets=(16,), batch_sizes=(1,))
    try:
        planned = decide(recipe)
        if load_format == "dummy":
            return "planned"
        model = load_model(planned.plan, planned.config, "sdpa", (), planned.traced_model)
        return "loaded" if has_weights_of_shards(model, folder) else "loaded other weights"
    except TcdeployError as error:
        return "refused" if error.message and error.hint else f"no hint: {error.message}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def run_limited(folder: Path, load_format: str) -> str:
    """`attempt` in a fork with limits."""

    def child(connection: Connection) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        limit = psutil.Process().memory_info().vms + MEMORY_LIMIT_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        signal.alarm(TIME_LIMIT_S)
        connection.send(attempt(folder, load_format)[:500])

    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(sender,))
    process.start()
    sender.close()
    process.join()
    return str(receiver.recv()) if receiver.poll() else f"exit code {process.exitcode}"


def run(source: random.Random, count: int) -> dict[str, Any]:
    outcomes: Counter[str] = Counter()
    succeeded = []
    with tempfile.TemporaryDirectory(prefix="tcdeploy-configs-") as root:
        for number in range(count):
            folder = Path(root, "model")
            folder.mkdir()
            make = ATTACKS[number % len(ATTACKS)]
            outcome = run_limited(folder, make(folder, source))
            is_expected = outcome in ("planned", "loaded", "refused")
            outcomes[f"{make.__name__}: {outcome if is_expected else 'failed'}"] += 1
            if not is_expected:
                config = (folder / "config.json").read_text(errors="replace")
                succeeded.append(f"{make.__name__}, number {number}: {outcome}; config {config[:3000]}")
            shutil.rmtree(folder)
    return {"attacks": count, "outcomes": dict(sorted(outcomes.items())), "succeeded": succeeded}
