"""What `model_code.decide` knows about a deployment before a weight is loaded. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tcdeploy.cache.record.toolchain import Toolchain
from tcdeploy.engine.generation_defaults import GenerationDefaults
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.decision import Decision
from tcdeploy.planning.dry_run import PlanFinding
from tcdeploy.planning.environment import Environment
from tcdeploy.planning.plan import Plan
from tcdeploy.planning.recipe import Recipe

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class PlannedDeployment:
    recipe: Recipe
    config: PreTrainedConfig
    environment: Environment
    architecture: Architecture
    fake_model: nn.Module  # without weights (models/probe.py)
    plan: Plan
    generation_defaults: GenerationDefaults
    model_decisions: tuple[Decision, ...]  # made while the model's files were read
    cached_toolchain: Toolchain | None = None  # recorded C++ compiler to replay; None: use this machine's
    tokenizer: Any = None  # None: not loaded by `decide`
    findings: tuple[PlanFinding, ...] = ()  # of a dry run: what this machine lacks
