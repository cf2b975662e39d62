"""The reference of the parity check as a file in the cache folder, so that later starts need not compute it.

    references/NAME.safetensors

NAME is a hash of the plan's key (which covers the config), the weights in memory, the prompts, and the source files
that define the model's modules and this package. It covers functions that the model calls in other files only by the
version of transformers, or not at all. If such a function changes, the logits differ from the stored ones, and the
start loads the model again and computes the reference (start/model_code.py). Like a program, the file is listed in the
plan's manifest with its sha256.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tcdeploy.cache.folder.layout import REFERENCES_DIR
from tcdeploy.engine.check.check_prompts import CheckPrompts, PromptPrefix
from tcdeploy.engine.check.reference import PrefixLogits, ReferenceLogits
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.models.sources import model_sources
from tcdeploy.models.weights.digest import weights_digest
from tcdeploy.planning.bucket_record import BucketRecord
from tcdeploy.planning.plan import Plan

PACKAGE = Path(__file__).parents[2]
MIN_FREE_COPIES = 3  # in the staging folder, in the cache folder, and one to spare
log = logging.getLogger("tcdeploy.engine")


def stores_references(plan: Plan) -> bool:
    """Whether starts of the plan store their reference under `reference_path`.

    Not with ahead-of-time programs: if a function changes that the name does not cover, the reference and the programs
    would both be those of the former function, and agree. A start record lists all source files instead
    (start/record/record.py). Not for random weights on a GPU: there a reference takes 1 to 2 s to compute, and a bundle
    that CI makes without the weights would have 0.8 MB more for each row.
    """
    return plan.programs == "jit" and not (plan.device == "cuda" and plan.load_format == "dummy")


def reference_path(runner: ModelRunner, prompts: CheckPrompts) -> str | None:
    """The path of the reference in the cache folder; None if a source file of the model was removed.

    Reads all weights. After any edit of this package, even of a comment, the next start computes the reference again.
    """
    try:
        sources_of_model = model_sources(runner.model)
    except OSError:
        return None
    factors = [
        runner.plan.key,
        weights_digest(runner.model),
        [[*prefix, prompts.token_ids(prefix)] for prefix in prompts.all_prefixes()],
        sources_of_model,
        {
            path.relative_to(PACKAGE).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(PACKAGE.rglob("*.py"))
        },
    ]
    digest = hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()
    return f"{REFERENCES_DIR}/{digest[:32]}.safetensors"


def reference_digest(reference: ReferenceLogits) -> str:
    """32 hex digits over the logits."""
    digest = hashlib.sha256(reference.dtype.encode())
    for prefix in sorted(reference.rows):
        digest.update(json.dumps(prefix).encode())
        for logits in reference.rows[prefix]:
            digest.update(bytes(logits.contiguous().view(torch.uint8).numpy()))
    return digest.hexdigest()[:32]


def write_reference(path: Path, reference: ReferenceLogits, plan: Plan, records: Iterable[BucketRecord]) -> bool:
    """Write the reference of a start that ended with `records`, and return whether it was written.

    Not if a bucket needed several sets of prompts, because it would fail on the stored first set again, or if the
    reference was not computed in a higher precision. A warning is logged if there is no room or a write fails.
    """
    if reference.dtype == plan.compute_dtype or any(record.parity.attempts > 1 for record in records):
        return False
    prefixes = sorted(reference.rows)
    tensors = {
        "prefixes": torch.tensor(prefixes, dtype=torch.int64),
        "eager": torch.stack([reference.rows[prefix].eager for prefix in prefixes]),
        "precise": torch.stack([reference.rows[prefix].precise for prefix in prefixes]),
        "sampled_distances": reference.sampled_distances,
    }
    size = sum(tensor.nbytes for tensor in tensors.values())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(path.parent).free < MIN_FREE_COPIES * size:
            log.warning("the reference of the parity check is not stored: it has %d bytes, and the disk is full", size)
            return False
        save_file(tensors, path, {"dtype": reference.dtype})
    except (OSError, SafetensorError) as error:
        log.warning("the reference of the parity check is not stored: %s", error)
        return False
    return True


def read_reference(path: Path, device: str = "cpu") -> ReferenceLogits | None:
    """A stored reference with its logits on `device`; None if the file does not exist or does not hold one."""
    try:
        with safe_open(path, framework="pt") as file:
            prefixes, eager, precise = (file.get_tensor(name) for name in ("prefixes", "eager", "precise"))
            eager, precise = eager.to(device), precise.to(device)
            rows = {
                PromptPrefix(*prefix): PrefixLogits(*logits)
                for prefix, *logits in zip(prefixes.tolist(), eager, precise, strict=True)
            }
            return ReferenceLogits(rows, file.metadata()["dtype"], file.get_tensor("sampled_distances"))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None
