"""OpenAI's `system_fingerprint`: equal for servers with the same version, plan and weight samples.

It does not cover the tokenizer, the chat template and generation_config.json.

The plan's key covers the model's config, the hardware, the versions of packages and the settings of its programs.
Weights are sampled: reading a whole checkpoint would delay the start by seconds. Each file contributes its name, its
size and samples of its bytes, so fine-tunes of one model usually have different fingerprints.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from tcdeploy import __version__
from tcdeploy.models.location import local_folder
from tcdeploy.start.record.factors import sampled_digest, weight_files

if TYPE_CHECKING:
    from tcdeploy.planning.plan import Plan

FINGERPRINT_DIGITS = 10  # as many as OpenAI's


def system_fingerprint(plan: Plan) -> str:
    """`fp_` and hex digits. Random weights, and files that cannot be found, are represented by the plan's key only."""
    digest = hashlib.sha256(f"{__version__} {plan.key} {plan.load_format}".encode())
    folder = None if plan.load_format == "dummy" else local_folder(plan.model, plan.revision)
    for path in weight_files(folder) if folder else ():
        digest.update(f"{path.name} {path.stat().st_size} {sampled_digest(path)}".encode())
    return f"fp_{digest.hexdigest()[:FINGERPRINT_DIGITS]}"
