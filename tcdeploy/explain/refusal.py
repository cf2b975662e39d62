"""Explains a model that cannot be planned, because its forward pass depends on the values of tensors.

A start runs every model once on fake tensors (models/probe.py), which have sizes but no values. A model that reads
values fails there, before anything is traced. The exception's traceback contains the line, and its frames the modules.
The cost is measured on transformers' own model with random weights, for one prompt, unless the model is large.
"""

from __future__ import annotations

import dataclasses
import re
import traceback

import torch
from torch import nn

from tcdeploy.errors import UnsupportedModelError
from tcdeploy.explain.eager_cost import measure_calls
from tcdeploy.explain.findings import BREAK_CAUSES, Cause, Finding, make_finding
from tcdeploy.explain.source_line import model_line, read_frames
from tcdeploy.models.auto_classes import auto_class
from tcdeploy.models.load import load_config, quiet_transformers
from tcdeploy.models.load_errors import exception_chain
from tcdeploy.models.probe_failure import SIZE_ERROR, VALUE_ERROR
from tcdeploy.models.refusals import has_final_reason
from tcdeploy.planning.recipe import Recipe

CONDITION = re.compile(r"^(if|elif|while|assert)\b|\bif\b.+\belse\b|\b(and|or|not)\b")
CAUSES = {cause.name: cause for cause in BREAK_CAUSES}
MAX_PARAMETERS = 500_000_000  # of a model that is built to measure the cost: 2 GB in float32
PROMPT_TOKENS = 32


def explain_refusal(recipe: Recipe, error: UnsupportedModelError) -> Finding | None:
    """The line that reads values of tensors, with its cost; None if no change of the model's code would help."""
    if has_final_reason(error):
        return None
    for cause in exception_chain(error):
        if type(cause).__name__ in (VALUE_ERROR, SIZE_ERROR):
            return _explain(recipe, cause)
    return None


def _explain(recipe: Recipe, error: BaseException) -> Finding:
    name = type(error).__name__
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]  # whose methods are in the frames
    location = model_line(read_frames(traceback.extract_tb(error.__traceback__)))
    path = next((path for path, module in modules[0].named_modules() if module is modules[-1]), "") if modules else ""
    reason = f"{name}: {next(iter(str(error).strip().splitlines()), '')}"
    finding = make_finding("graph break", _classify(name, location.code), "", path, "", location, reason, True)
    num_parameters = sum(parameter.numel() for parameter in modules[0].parameters()) if modules else 0
    return _with_measured_cost(recipe, finding) if 0 < num_parameters <= MAX_PARAMETERS else finding


def _classify(error: str, code: str) -> Cause:
    if error == SIZE_ERROR:
        return CAUSES["data-dependent-shape"]
    return CAUSES["data-dependent-branch" if CONDITION.search(code) else "scalar-read"]


def _with_measured_cost(recipe: Recipe, finding: Finding) -> Finding:
    """The finding, with the time of the modules that contain the line."""
    config = load_config(recipe)
    with quiet_transformers():
        model = (
            auto_class(config, recipe.trust_remote_code)
            .from_config(config, dtype=torch.float32, trust_remote_code=recipe.trust_remote_code)
            .eval()
        )
    pattern = re.compile(re.sub(r"\\\.\d+(?=\\\.|$)", r"\\.\\d+", re.escape(finding.module)))
    modules = [module for path, module in model.named_modules() if path and pattern.fullmatch(path)]
    input_ids = torch.arange(PROMPT_TOKENS)[None] % model.get_input_embeddings().num_embeddings
    with torch.no_grad():
        seconds = measure_calls(lambda: model(input_ids=input_ids, use_cache=False), modules, "cpu")
    cost = seconds.cost(f"prompt of {PROMPT_TOKENS} tokens", finding, None, modules)
    return dataclasses.replace(finding, costs=(cost,))
