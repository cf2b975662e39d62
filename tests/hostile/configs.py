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
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from tcdeploy.errors import TcdeployError
from tcdeploy.models.load import load_model, resolve_model_path
from tcdeploy.pipeline import decide
from tcdeploy.planning.recipe import Recipe
from tests.model_families import SHAPE_ONLY, SUPPORTED, UNSUPPORTED

DEFAULT_COUNT = 1000
TIME_LIMIT_S = 60
MEMORY_LIMIT_BYTES = 6 << 30  # more than a fork has when it starts
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 3, 7, 2**15, 2**31, 2**63, 10**30, -(2**40), 0.0, 0.5, -1.5, 1e300, float("nan"),
    float("inf"), "", "x", "auto", "float16", "int8", "../../etc/passwd", "a" * 5000, [], [1], ["x"], [None] * 9,
    {}, {"x": 1}, {"rope_type": "longrope"}, {"rope_type": "dynamic", "factor": 2.0}, {"": []}, [[[]]], [{}],
]  # fmt: skip
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


ATTACKS = (config_only, config_only, with_weights, config_text, damaged_weights)


def attempt(folder: Path, load_format: Any) -> str:
    """Plan, and load the weights if there are any. Returns "planned", "loaded", "refused" or what went wrong."""
    recipe = Recipe(model=str(folder), load_format=load_format, buckets=(16,), batch_sizes=(1,))
    try:
        planned = decide(recipe)
        if load_format == "dummy":
            return "planned"
        load_model(planned.plan, planned.config, "sdpa")
        return "loaded"
    except TcdeployError as error:
        return "refused" if error.message and error.hint else f"no hint: {error.message}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def run_limited(folder: Path, load_format: str) -> str:
    """`attempt` in a fork with limits."""

    def child(connection: Connection) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
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
