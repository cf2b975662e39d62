"""What a start was asked for, and what it decides before it loads anything. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tcdeploy.host.progress import NullProgress, Progress
from tcdeploy.planning.recipe import Recipe

if TYPE_CHECKING:  # `prepare` imports this module before its threads begin
    from torch import nn
    from transformers import PreTrainedConfig

    from tcdeploy.cache.record.provenance import SigningPolicy
    from tcdeploy.engine.generation_defaults import GenerationDefaults
    from tcdeploy.models.traced_model import TracedModel
    from tcdeploy.models.weights.files import Checkpoint
    from tcdeploy.planning.architecture import Architecture
    from tcdeploy.planning.decision import Decision
    from tcdeploy.planning.dry_run import PlanFinding
    from tcdeploy.planning.environment import Environment
    from tcdeploy.planning.plan import Plan


@dataclass(frozen=True)
class StartRequest:
    """The parameters of `prepare`, which describes them."""

    recipe: Recipe
    progress: Progress = field(default_factory=NullProgress)
    measure: bool = False
    trusted_keys: Path | None = None
    needs_tokenizer: bool = False
    eager: bool = False
    needs_model: bool = False
    serves: bool = False

    @property
    def jit_reason(self) -> str:
        """Why `--programs auto` is jit in this start, whatever the cache folder has; "" if packages may be used."""
        if self.eager:
            return "--start eager compiles them while the server runs"
        return "their steps are compared with uncompiled ones" if self.measure else ""

    @property
    def signing_policy(self) -> SigningPolicy:
        from tcdeploy.cache.record.provenance import SigningPolicy
        from tcdeploy.cache.trust.signing import default_trusted_keys_folder

        return SigningPolicy(self.trusted_keys or default_trusted_keys_folder(), self.recipe.require_signed)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What every start decides. A start record adds its files (start/record/lookup.py)."""

    recipe: Recipe
    environment: Environment
    architecture: Architecture
    plan: Plan
    generation_defaults: GenerationDefaults


@dataclass(frozen=True, kw_only=True)
class PlannedModel(Planned):
    """What `decide` also finds in the model's code and files (start/decide.py)."""

    config: PreTrainedConfig
    fake_model: nn.Module  # without weights (models/probe.py)
    checkpoint: Checkpoint | None  # None: there are no safetensors files yet, or the weights are random
    model_decisions: tuple[Decision, ...]  # made while the model's files were read
    tokenizer: Any = None  # None: not loaded by `decide`
    traced_model: TracedModel | None = None  # None: transformers loads the weights, or they are random
    findings: tuple[PlanFinding, ...] = ()  # of a dry run: what this machine lacks
