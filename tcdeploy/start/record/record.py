"""What a later start needs to know about a model to run its ahead-of-time packages without its code.

    aot/start-KEY-CONTENT.json          the record
    aot/start-KEY-CONTENT.safetensors   the model's computed buffers, such as rotary frequencies
    aot/kernels-CONTENT.json            compiled Triton kernels (torch_compat/triton/stored_kernels.py), on a GPU
    aot/tokenizer-CONTENT.json          the tokenizer's backend, if the model's tokenizer.json is not equal to it
    references/CONTENT.safetensors      the reference of the parity check

A start with `--programs aot` that loads the model with transformers writes these files. KEY hashes what is known before
anything is loaded (start/record/factors.py). A later start with the same key reads the record, checks it, and loads the
weights from where the record says they are in the checkpoint (start/packages.py).

The record also lists the source files of transformers that computed the reference. A start does not use it if one of
them has changed, or if another version of transformers is installed. Does not import torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tcdeploy.cache.folder.layout import AOT_DIR
from tcdeploy.cache.record.provenance import ListedFiles, SigningPolicy, read_listed
from tcdeploy.engine.generation_defaults import GenerationDefaults
from tcdeploy.host.typed_json import from_json
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.decision import Decision
from tcdeploy.start.record.factors import StartFactors
from tcdeploy.text.stored_tokenizer import TokenizerRecord

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA: Literal[4] = 4
# Names of the two entries of `defaults` and `decisions`: of commands that generate text, and of others.
WITH_TOKENIZER, WITHOUT_TOKENIZER = "with tokenizer", "without tokenizer"
# Set by tcdeploy or by torch itself, so not compared.
SET_VARIABLES = {
    "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_CACHE_MANAGER", "TRITON_PTXAS_PATH",
}  # fmt: skip
# Of variables that may change what is compiled.
COMPILER_PREFIXES = ("TORCHINDUCTOR_", "TORCH_COMPILE", "TORCHDYNAMO_", "AOT_INDUCTOR_", "TRITON_")


@dataclass(frozen=True)
class StartRecord:
    """The content of the JSON file. The environment of the packages is in the manifest that lists it.

    defaults, decisions: by WITH_TOKENIZER or WITHOUT_TOKENIZER.
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
    sources: dict[str, str]
    variables: dict[str, str]
    architecture: Architecture
    config: dict[str, Any]
    defaults: dict[str, GenerationDefaults]
    decisions: dict[str, tuple[Decision, ...]]
    supports_logits_to_keep: bool
    weights: dict[str, Any]
    tokenizer: TokenizerRecord | None
    tokenizer_problem: str
    schema: Literal[4] = SCHEMA

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
    folder: Path, record: StartRecord, buffers: Mapping[str, Tensor], backend_json: str, kernels_json: str
) -> list[str]:
    """Write the record, its buffers, its tokenizer's backend and its kernels below `folder`.

    Returns the paths of all its files, the reference included. `backend_json`, `kernels_json`: "" if none is stored.
    """
    from safetensors.torch import save

    Path(folder, AOT_DIR).mkdir(parents=True, exist_ok=True)
    if backend_json and record.tokenizer is not None:
        backend = _write_text(folder, "tokenizer", backend_json)
        record = dataclasses.replace(record, tokenizer=dataclasses.replace(record.tokenizer, backend=backend))
    if kernels_json:
        record = dataclasses.replace(record, kernels=_write_text(folder, "kernels", kernels_json))
    content = save(dict(buffers))
    digest = hashlib.sha256(content + to_json(record).encode()).hexdigest()[:16]
    stem = f"{AOT_DIR}/start-{record.factors.key}-{digest}"
    record = dataclasses.replace(record, buffers=f"{stem}.safetensors")
    Path(folder, record.buffers).write_bytes(content)
    Path(folder, f"{stem}.json").write_text(to_json(record))
    return [f"{stem}.json", *record.files()]


def _write_text(folder: Path, name: str, text: str) -> str:
    """Write a file that is named by its content. Returns its path in the cache folder."""
    path = f"{AOT_DIR}/{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    Path(folder, path).write_text(text, encoding="utf-8")
    return path


def to_json(record: StartRecord) -> str:
    return json.dumps(dataclasses.asdict(record))


def parse_factors(content: bytes) -> StartFactors | None:
    """The factors of a record, perhaps of another version of tcdeploy; None if it has no such factors.

    Raises ValueError or RecursionError if the text is not a record.
    """
    values = json.loads(content)
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    with contextlib.suppress(ValueError):
        return from_json(StartFactors, values.get("factors"))
    return None


def find_records(cache_dir: str | Path, policy: SigningPolicy, key: str = "") -> ListedFiles:
    """The records that a plan lists, newest first. `key`: of the factors; "" for records of all keys."""
    return read_listed(cache_dir, f"{AOT_DIR}/start-{f'{key}-' if key else ''}", ".json", policy)
