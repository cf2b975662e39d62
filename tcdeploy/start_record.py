"""What a later start needs to know about a model to run its ahead-of-time packages without its code.

    aot/start-KEY-CONTENT.json          the record
    aot/start-KEY-CONTENT.safetensors   the model's computed buffers, such as rotary frequencies
    aot/kernels-CONTENT.json            compiled Triton kernels (torch_compat/stored_kernels.py), on a GPU
    aot/tokenizer-CONTENT.json          the tokenizer's backend, if the model's tokenizer.json is not equal to it
    references/CONTENT.safetensors      the reference of the parity check

A start with `--programs aot` that loads the model with transformers writes these files. KEY hashes what is known before
anything is loaded (start_factors.py). A later start with the same key reads the record, checks it, and loads the
weights from where the record says they are in the checkpoint (packaged_start.py).

The record also lists the source files of transformers that computed the reference. A start does not use it if one of
them has changed, or if another version of transformers is installed. Does not import torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcdeploy.cache.contents import AOT_DIR
from tcdeploy.engine.generation_defaults import GenerationDefaults
from tcdeploy.models.stored_tokenizer import TokenizerRecord
from tcdeploy.planning.architecture import Architecture, AttentionSpec
from tcdeploy.planning.decision import Decision
from tcdeploy.start_factors import StartFactors

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 3
# Names of the two entries of `defaults` and `decisions`: of commands that generate text, and of others.
WITH_TOKENIZER, WITHOUT_TOKENIZER = "with tokenizer", "without tokenizer"
# Set by tcdeploy or by torch itself, so not compared.
SET_VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER", "TRITON_PTXAS_PATH",
}  # fmt: skip
# Of variables that may change what is compiled.
COMPILER_PREFIXES = ("TORCHINDUCTOR_", "TORCH_COMPILE", "TORCHDYNAMO_", "AOT_INDUCTOR_", "TRITON_")
log = logging.getLogger("tcdeploy.pipeline")


@dataclass(frozen=True)
class StartRecord:
    """The content of the JSON file.

    defaults, decisions: by WITH_TOKENIZER or WITHOUT_TOKENIZER.
    compiler, triton, install_paths, torch_settings: as in `Environment`.
    sources: sha256 of files of transformers, by path in its folder.
    variables: `compiler_variables` of the start that wrote the record.
    weights: by name in the model, as `weight_sources.WeightSource`.
    tokenizer: None if the model has none, or if it cannot be stored, which `tokenizer_problem` then explains.
    """

    factors: StartFactors  # of the start that wrote it
    plan_key: str
    package_folder: str  # relative to the cache folder, as the three paths below
    reference: str
    buffers: str
    kernels: str  # "" on a CPU, or if no kernel could be recorded; launches then go through Triton
    transformers: str  # version
    compiler: str
    triton: str
    install_paths: str
    torch_settings: str
    sources: dict[str, str]
    variables: dict[str, str]
    missing_internals: tuple[tuple[str, str], ...]
    architecture: Architecture
    config: dict[str, Any]
    defaults: dict[str, GenerationDefaults]
    decisions: dict[str, tuple[Decision, ...]]
    supports_logits_to_keep: bool
    weights: dict[str, Any]
    tokenizer: TokenizerRecord | None
    tokenizer_problem: str
    schema: int = SCHEMA

    def files(self) -> list[str]:
        """The paths of the files that belong to the record, in the cache folder."""
        backend = [self.tokenizer.backend] if self.tokenizer is not None and self.tokenizer.backend else []
        return [self.buffers, self.reference, *backend, *filter(None, [self.kernels])]


def compiler_variables() -> dict[str, str]:
    """The variables of this process that may change what torch and Triton compile."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(COMPILER_PREFIXES) and name not in SET_VARIABLES
    }


def write_record(
    folder: Path,
    record: StartRecord,
    buffers: Mapping[str, Tensor],
    backend_json: str = "",
    kernels_json: str = "",
) -> list[str]:
    """Write the record, its buffers, its tokenizer's backend and its kernels below `folder`.

    Returns the paths of all its files, the reference included. `backend_json`, `kernels_json`: "" if none is stored.
    """
    from safetensors.torch import save

    Path(folder, AOT_DIR).mkdir(parents=True, exist_ok=True)
    if backend_json and record.tokenizer is not None:
        backend = f"{AOT_DIR}/tokenizer-{hashlib.sha256(backend_json.encode()).hexdigest()[:16]}.json"
        Path(folder, backend).write_text(backend_json, encoding="utf-8")
        record = dataclasses.replace(record, tokenizer=dataclasses.replace(record.tokenizer, backend=backend))
    if kernels_json:
        kernels = f"{AOT_DIR}/kernels-{hashlib.sha256(kernels_json.encode()).hexdigest()[:16]}.json"
        Path(folder, kernels).write_text(kernels_json, encoding="utf-8")
        record = dataclasses.replace(record, kernels=kernels)
    content = save(dict(buffers))
    digest = hashlib.sha256(content + to_json(record).encode()).hexdigest()[:16]
    stem = f"{AOT_DIR}/start-{record.factors.key}-{digest}"
    record = dataclasses.replace(record, buffers=f"{stem}.safetensors")
    Path(folder, record.buffers).write_bytes(content)
    Path(folder, f"{stem}.json").write_text(to_json(record))
    return [f"{stem}.json", *record.files()]


def to_json(record: StartRecord) -> str:
    return json.dumps(dataclasses.asdict(record))


def parse_record(text: str) -> StartRecord:
    """The inverse of `to_json`. Raises ValueError, KeyError or TypeError for another text."""
    values: dict[str, Any] = json.loads(text)
    if values["schema"] != SCHEMA:
        raise ValueError(f"schema {values['schema']}")
    architecture = values["architecture"]
    tokenizer = values["tokenizer"]
    layers = tuple(AttentionSpec(**spec) for spec in architecture["attention_layers"])
    packed = tuple(tuple(group) for group in architecture["packed_linears"])
    return StartRecord(
        **{
            **values,
            "factors": StartFactors(**values["factors"]),
            "missing_internals": tuple((name, text) for name, text in values["missing_internals"]),
            "architecture": Architecture(**{**architecture, "attention_layers": layers, "packed_linears": packed}),
            "defaults": {name: _defaults(item) for name, item in values["defaults"].items()},
            "decisions": {
                name: tuple(Decision(**item) for item in items) for name, items in values["decisions"].items()
            },
            "tokenizer": tokenizer and TokenizerRecord(**{**tokenizer, "special_ids": tuple(tokenizer["special_ids"])}),
        }
    )


def parse_factors(text: str) -> tuple[str, StartFactors | None]:
    """(plan key, factors) of a record that another version of tcdeploy may have written. None: it has no such factors.

    Raises ValueError, KeyError, TypeError or RecursionError if the text is not a record.
    """
    values: dict[str, Any] = json.loads(text)
    plan_key = str(values["plan_key"])
    try:
        return plan_key, StartFactors(**{item.name: values["factors"][item.name] for item in fields(StartFactors)})
    except (KeyError, TypeError):
        return plan_key, None


def _defaults(values: Mapping[str, Any]) -> GenerationDefaults:
    return GenerationDefaults(**{**values, "stop_token_ids": tuple(values["stop_token_ids"])})


def find_records(cache_dir: str | Path, key: str | None = None) -> list[tuple[str, str]]:
    """(path in the folder, text) of the records with this key, newest first. None: of all keys."""
    found: list[tuple[float, str, str]] = []
    for path in Path(cache_dir, AOT_DIR).glob(f"start-{key or '*'}-*.json"):
        try:
            found.append((path.stat().st_mtime, path.relative_to(cache_dir).as_posix(), path.read_text()))
        except (OSError, ValueError) as error:
            log.debug("%s cannot be read: %s", path, error)
    return [(path, text) for _, path, text in sorted(found, reverse=True)]
