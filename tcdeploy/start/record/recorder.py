"""Collects what a later start from packages needs to know about the model, and writes it (start/record/record.py)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from tcdeploy.cache.folder.layout import REFERENCES_DIR
from tcdeploy.cache.staging.folder import StagingFolder
from tcdeploy.engine.check.parity_check import ParityChecker
from tcdeploy.engine.check.stored_reference import reference_digest, write_reference
from tcdeploy.engine.generation_defaults import read_model_defaults
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.errors import ModelError, TcdeployError
from tcdeploy.models.load import config_to_dict
from tcdeploy.models.location import local_folder
from tcdeploy.models.sources import digest_sources, record_executed_files, source_files
from tcdeploy.models.traced_model import NotTraceableError
from tcdeploy.models.weights.sources import WeightNotInCheckpointError, describe_weights
from tcdeploy.models.weights.weight_paths import weight_files
from tcdeploy.planning.bucket_record import BucketRecord
from tcdeploy.programs.aot import AotForward
from tcdeploy.start.decide import trace_weights
from tcdeploy.start.planned import PlannedModel
from tcdeploy.start.record.factors import StartFactors, start_factors
from tcdeploy.start.record.record import (
    WITH_TOKENIZER,
    WITHOUT_TOKENIZER,
    StartRecord,
    compiler_variables,
    write_record,
)
from tcdeploy.text.tokenizer import TokenizerDescription, describe_tokenizer, load_tokenizer
from tcdeploy.torch_compat.triton.kernel import record_kernels

log = logging.getLogger("tcdeploy.start")


class StartRecorder:
    """Records compiled Triton kernels, until `stop_recording_kernels`, and source files that are executed.

    `factors`: as they are when the start begins. None: nothing is recorded or written.
    """

    def __init__(self, factors: StartFactors | None) -> None:
        self._factors = factors
        self._files: set[str] = set()  # those that define the model
        self._kernels = record_kernels() if factors is not None else None

    @contextmanager
    def recording_sources(self) -> Iterator[None]:
        """Record the source files that this thread executes in the block. Python is slower meanwhile."""
        if self._factors is None:
            yield
            return
        with record_executed_files(self._files):
            yield

    def write(
        self,
        planned: PlannedModel,
        runner: ModelRunner,
        checker: ParityChecker,
        records: list[BucketRecord],
        staging: StagingFolder,
    ) -> list[str]:
        """Write the record and its files. Returns their paths in the cache folder; [] if it cannot, and logs why."""
        if self._factors is None or self._kernels is None:
            return []
        recipe, architecture = planned.recipe, planned.architecture
        folder = local_folder(recipe.model, recipe.revision)
        forward = cast(AotForward, runner.forward)
        if folder is None or start_factors(recipe, folder) != self._factors:
            log.warning("later starts load this model with transformers: its files have changed during this start")
            return []
        if forward.foreign_ops:
            names = ", ".join(sorted(forward.foreign_ops))
            log.warning("later starts load this model with transformers, because its packages call %s", names)
            return []
        try:
            if planned.checkpoint is not None and planned.checkpoint.paths != weight_files(recipe.model, folder):
                raise WeightNotInCheckpointError("config.json names other weight files than those of the folder")
            with self.recording_sources():  # also the code that converts weights
                traced = trace_weights(planned)
            weights = describe_weights(runner.model, traced.sources, traced.checkpoint)
            sources = digest_sources(self._files | source_files(runner.model))
        except (NotTraceableError, WeightNotInCheckpointError, ModelError, OSError) as reason:
            log.warning("later starts load this model with transformers, and not from its packages alone: %s", reason)
            return []
        reference = f"{REFERENCES_DIR}/{reference_digest(checker.reference)}.safetensors"
        if not write_reference(Path(staging.path, reference), checker.reference, planned.plan, records):
            return []
        tokenizer, described = planned.tokenizer, TokenizerDescription(None, "", "")
        with suppress(TcdeployError):  # the model may have none
            tokenizer = tokenizer or load_tokenizer(recipe)  # `warm` has not loaded it
        if tokenizer is not None:
            described = describe_tokenizer(tokenizer, architecture.model_type, folder)
        if described.problem:
            log.warning("later starts load the tokenizer with transformers: %s", described.problem)
        record = _make_record(
            self._factors, planned, tokenizer, package_folder=forward.folder.relative_to(staging.path).as_posix(),
            supports_logits_to_keep=forward.supports_logits_to_keep, reference=reference, sources=sources,
            weights=dict(weights.sources), tokenizer=described.record, tokenizer_problem=described.problem,
        )  # fmt: skip
        try:
            return write_record(
                Path(staging.path), record, weights.stored, described.backend_json, self._kernels.to_json()
            )
        except OSError as error:
            log.warning("later starts load this model with transformers: their record cannot be written: %s", error)
            return []


def _make_record(factors: StartFactors, planned: PlannedModel, loaded_tokenizer: Any, **found: Any) -> StartRecord:
    """The record of this start, whose buffers and kernels are not written yet. `found`: its other fields."""
    defaults, decisions = {}, {}
    for name, used in ((WITHOUT_TOKENIZER, None), (WITH_TOKENIZER, loaded_tokenizer)):
        if name == WITHOUT_TOKENIZER or used is not None:
            found_defaults = read_model_defaults(planned.recipe, planned.config, planned.architecture, used)
            defaults[name], decisions[name] = found_defaults
    return StartRecord(
        factors=factors, plan_key=planned.plan.key, buffers="", kernels="", variables=compiler_variables(),
        architecture=planned.architecture, config=config_to_dict(planned.config), defaults=defaults,
        decisions=decisions, **found,
    )  # fmt: skip
