"""Decides everything about a model with its code, before its weights are loaded."""

from __future__ import annotations

from tcdeploy.host.stages import ImportStage

# ruff: noqa: E402 - importing is a stage, and its seconds are reported
from tcdeploy.planning.extras import require_compile_extra

_import_stage = ImportStage()
require_compile_extra()

from tcdeploy.models.unused_packages import import_transformers

import_transformers()  # before other modules import it

import contextlib
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig

from tcdeploy.cache.record.manifest import Origin
from tcdeploy.cache.record.provenance import SigningPolicy
from tcdeploy.engine.generation_defaults import read_model_defaults
from tcdeploy.errors import TcdeployError, UsageError
from tcdeploy.kernels.attention.interface import ATTN_IMPLEMENTATION, register_attention
from tcdeploy.kernels.linear import ops  # noqa: F401 - registers the schemes
from tcdeploy.kernels.state.mechanisms import MECHANISMS
from tcdeploy.models.convert.kv_scales import DUMMY_SCALES, find_kv_scales, trace_kv_scales
from tcdeploy.models.convert.quantised_weights import loading_refusal
from tcdeploy.models.convert.requested_schemes import request_schemes, with_schemes
from tcdeploy.models.formats.methods import has_fp8_inputs, is_quantised, quantisation_method, scheme_finder
from tcdeploy.models.load import config_to_dict, load_config, read_checkpoint
from tcdeploy.models.load_errors import translate_error
from tcdeploy.models.pretrained import LoadSettings
from tcdeploy.models.probe import ProbedModel, probe_model, quantise_probed
from tcdeploy.models.refusals import Refusals
from tcdeploy.models.sources import model_sources
from tcdeploy.models.traced_model import NotTraceableError, TracedModel, trace_model
from tcdeploy.models.weights.checkpoint import stored_dtype, tensor_shapes
from tcdeploy.models.weights.files import Checkpoint
from tcdeploy.planning.architecture import Architecture, digest_config
from tcdeploy.planning.backends import FP8_KV
from tcdeploy.planning.decision import Decision, Decisions, decide_inputs
from tcdeploy.planning.dry_run import PlanFinding, plan_with_findings
from tcdeploy.planning.environment import Environment, detect_environment
from tcdeploy.planning.gpu_description import GPUDescription, with_target_gpu
from tcdeploy.planning.memory import DTYPE_BYTES, gib
from tcdeploy.planning.plan import Plan, make_plan
from tcdeploy.planning.quantize_request import parse_quantize
from tcdeploy.planning.recipe import Recipe
from tcdeploy.programs.passes.post_grad import op_source_digests
from tcdeploy.start.auto_programs import resolve_planned
from tcdeploy.start.planned import PlannedModel
from tcdeploy.text.tokenizer import load_tokenizer
from tcdeploy.torch_compat.inductor.settings import disabling_settings, settings_digest, torch_settings
from tcdeploy.torch_compat.registry import missing_internals

_import_stage.end()
_kept_probe: dict[str, ProbedModel] = {}  # by config; removed by the next `decide` for this config
NO_COMPILER = PlanFinding(
    "compiler",
    "there is no C++ compiler, so only ahead-of-time packages that are in the cache folder can run",
    "install g++, or pack the model on a machine with g++: tcdeploy cache pack MODEL --programs aot",
)


def decide(
    recipe: Recipe, needs_tokenizer: bool = False, is_dry_run: bool = False, jit_reason: str = "",
    policy: SigningPolicy | None = None, needs_weights: bool = True, target: GPUDescription | None = None,
    keeps_probe: bool = False,
) -> PlannedModel:  # fmt: skip
    """Decide everything before the weights are loaded. Of those on disk, only headers of safetensors files are read.

    `needs_tokenizer`: load the tokenizer too, and add its end-of-sequence token to the stop tokens. `is_dry_run`:
    report what this machine lacks in `findings` instead of raising an error. `jit_reason`, `policy`: for `--programs
    auto` (start/auto_programs.py). `needs_weights`: trace them. `target`: plan for this GPU instead of the machine's
    own. `keeps_probe`: keep the probed model for the next `decide` with the same config. Raises ModelError with all
    reasons if the model cannot be served; tensors that do not fit the config are reported alone, if the rest could be
    planned. Raises UsageError for a `target` that cannot be planned for.
    """
    environment = _detect_environment(recipe, target)
    model = _read_model(recipe, environment, needs_tokenizer, is_dry_run, keeps_probe)
    config, architecture, tokenizer = model.config, model.probed.architecture, model.tokenizer
    defaults, decisions = read_model_defaults(recipe, config, architecture, tokenizer)
    model, dtype_decisions = _with_stored_dtype(model)
    model, requested_decisions = _request_schemes(recipe, model)
    quantised = _decide_schemes(recipe, environment, model, is_dry_run)
    config, architecture, findings = model.config, quantised.architecture, quantised.findings
    scale_decisions = _explain_kv_scales(recipe, model)
    decisions = (
        *_explain_target(target),
        *decisions,
        *dtype_decisions,
        *requested_decisions,
        *scale_decisions,
        *quantised.decisions,
    )
    if is_dry_run:
        plan, recipe, environment, found = plan_with_findings(recipe, environment, architecture, decisions)
        findings += found
        if plan.device == "cpu" and not environment.compiler:
            findings = (*findings, NO_COMPILER)
    else:
        plan = make_plan(recipe, environment, architecture, decisions)
    planned = PlannedModel(
        recipe=recipe, environment=environment, architecture=architecture, plan=plan, generation_defaults=defaults,
        config=config, fake_model=model.probed.model, checkpoint=model.checkpoint,
        model_decisions=decisions, tokenizer=tokenizer, findings=findings, traced_model=quantised.traced,
    )  # fmt: skip
    planned = resolve_programs(planned, jit_reason, policy)
    if not needs_weights or recipe.load_format == "dummy" or is_quantised(config):
        return planned
    return _with_traced_weights(planned)


def _detect_environment(recipe: Recipe, target: GPUDescription | None) -> Environment:
    """The environment of this machine, with `target`, if not None, in place of its GPUs.

    Raises UsageError for a target with --device cpu, or one that torch's CUDA version does not support.
    """
    environment, digest = detect_environment(recipe.device), settings_digest(torch_settings())
    environment = dataclasses.replace(environment, missing_internals=missing_internals(), torch_settings=digest)
    if target is None:
        return environment
    if recipe.device == "cpu":
        raise UsageError("--target-gpu excludes --device cpu", "remove one of them")
    return with_target_gpu(environment, target, torch.version.cuda or "")


def _explain_target(target: GPUDescription | None) -> tuple[Decision, ...]:
    if target is None:
        return ()
    reason = "requested; the memory that torch reports on a machine with this GPU may differ"
    if torch.version.cuda is None:
        reason = f"requested; planned as for torch with CUDA {target.cuda}, because this torch is built for CPUs"
    return (Decision("target GPU", target.name, reason),)


class RequestedModel(NamedTuple):
    """A model that is quantised by `recipe.quantize`, as `tcdeploy quantize` needs it.

    model: without data; linear layers that stay dense are nn.Linear. decisions: why. device: the type of device
    that a start would use.
    """

    model: nn.Module
    traced: TracedModel
    decisions: tuple[Decision, ...]
    device: str


def trace_requested(recipe: Recipe) -> RequestedModel:
    """Decide the schemes of a recipe with `quantize`, and nothing else. Raises as `decide`."""
    environment = detect_environment(recipe.device)
    model, _ = _with_stored_dtype(_read_model(recipe, environment, needs_tokenizer=False, is_dry_run=True))
    model, decisions = _request_schemes(recipe, model)
    traced = _decide_schemes(recipe, environment, model, is_dry_run=False).traced
    assert traced is not None, "the recipe requests schemes of stored weights"
    return RequestedModel(model.probed.model, traced, decisions, "cuda" if environment.gpus else "cpu")


def _with_stored_dtype(model: _ModelFacts) -> tuple[_ModelFacts, tuple[Decision, ...]]:
    """The model with the dtype of its checkpoint, if config.json states none."""
    architecture = model.probed.architecture
    if not model.checkpoint or architecture.dtype or not (dtype := stored_dtype(model.checkpoint)):
        return model, ()
    probed = model.probed._replace(architecture=dataclasses.replace(architecture, dtype=dtype))
    reason = "dtype of the first floating-point tensor; config.json states none"
    return model._replace(probed=probed), (Decision("checkpoint dtype", dtype, reason),)


class _Quantised(NamedTuple):
    """A model after its quantised weights were found. Without such weights, only `architecture` is set, unchanged."""

    architecture: Architecture
    traced: TracedModel | None = None
    decisions: tuple[Decision, ...] = ()
    findings: tuple[PlanFinding, ...] = ()


class _Settings(NamedTuple):
    """The `LoadSettings` of a plan that is not made yet."""

    model: str
    revision: str | None
    trust_remote_code: bool
    weight_dtype: str


def _request_schemes(recipe: Recipe, model: _ModelFacts) -> tuple[_ModelFacts, tuple[Decision, ...]]:
    """The model with the config of a quantised one, if the recipe requests it. Raises UsageError."""
    config, (architecture, fake_model) = model.config, model.probed
    if recipe.quantize is None:
        if recipe.quantize_skip:
            raise UsageError("--quantize-skip needs --quantize", "remove --quantize-skip, or add --quantize fp8")
        return model, ()
    request = parse_quantize(recipe.quantize)
    if method := quantisation_method(config):
        raise UsageError(f"{recipe.model} is quantised already, with {method}", "serve it without --quantize")
    requested = request_schemes(fake_model, architecture, request, recipe.quantize_skip or ())
    config = with_schemes(config, requested.schemes, request)
    architecture = dataclasses.replace(
        architecture, quantisation=f"--quantize {request.text}", fp8_inputs=has_fp8_inputs(config),
        config_digest=digest_config(config_to_dict(config)),
    )  # fmt: skip
    return model._replace(config=config, probed=ProbedModel(architecture, fake_model)), requested.decisions


def _decide_schemes(recipe: Recipe, environment: Environment, model: _ModelFacts, is_dry_run: bool) -> _Quantised:
    """Find the schemes of quantised layers, on which memory and programs depend.

    They are found in the checkpoint's tensors, or in the config for random weights and with --quantize. Raises
    UnsupportedModelError if the weights cannot be traced; a dry run reports a finding instead.
    """
    config, probed = model.config, model.probed
    if not is_quantised(config):
        return _Quantised(probed.architecture)
    if recipe.load_format == "dummy":
        return _Quantised(quantise_probed(probed, scheme_finder(config)).architecture)
    dtype: str = recipe.dtype or "bfloat16"
    with contextlib.suppress(UsageError):  # of a device that this machine lacks; the plan reports it
        dtype = decide_inputs(recipe, environment, probed.architecture, Decisions()).dtypes.weight
    settings = _Settings(recipe.model, recipe.revision, recipe.trust_remote_code, dtype)
    try:
        traced = _trace(settings, config, model.checkpoint, probed, recipe.kv_dtype == "fp8")
    except NotTraceableError as error:
        refusal = _loading_refusal(recipe, config, str(error))
        if not is_dry_run:
            raise refusal from error
        finding = PlanFinding("weights", refusal.message, refusal.hint)
        return _Quantised(quantise_probed(probed, scheme_finder(config)).architecture, findings=(finding,))
    schemes, dequantised = traced.inserted
    decisions = tuple(
        Decision(f"dequantised to {dtype}", gib(elements * DTYPE_BYTES[dtype]), reason)
        for reason, elements in dequantised.items()
    )
    return _Quantised(quantise_probed(probed, schemes.get).architecture, traced, decisions)


def _loading_refusal(recipe: Recipe, config: PreTrainedConfig, reason: str) -> TcdeployError:
    if recipe.quantize is None:
        return loading_refusal(recipe.model, config, reason)
    message = f"{recipe.model} cannot be quantised while its files are read: {reason}"
    return UsageError(
        message, "download safetensors files (hf download), or save it with transformers' save_pretrained()"
    )


def _explain_kv_scales(recipe: Recipe, model: _ModelFacts) -> tuple[Decision, ...]:
    """Where the scales of K and V come from, if they are stored in FP8. Raises ModelError for unusable scales."""
    if recipe.kv_dtype != "fp8":
        return ()
    if recipe.load_format == "dummy":
        return (Decision("KV scales", "{} for K and {} for V".format(*DUMMY_SCALES), "of random weights"),)
    architecture = model.probed.architecture
    found = len(find_kv_scales(recipe.model, architecture, model.checkpoint).names)
    layers = len(architecture.attention_layers)
    if not found:
        return (Decision("KV scales", "1.0", "the checkpoint has none"),)
    others = "; 1.0 in the others" if found < layers else ""
    return (Decision("KV scales", "of the checkpoint", f"{found} of {layers} layers have them{others}"),)


def trace_weights(planned: PlannedModel) -> TracedModel:
    """Find where the model's tensors are in its checkpoint.

    Raises ModelError if the checkpoint does not fit the model, and NotTraceableError if transformers must load it.
    """
    probed = ProbedModel(planned.architecture, planned.fake_model)
    return _trace(planned.plan, planned.config, planned.checkpoint, probed, planned.plan.kv_dtype == FP8_KV)


def _trace(
    settings: LoadSettings,
    config: PreTrainedConfig,
    checkpoint: Checkpoint | None,
    probed: ProbedModel,
    has_fp8_kv: bool,
) -> TracedModel:
    """As `trace_weights`. `has_fp8_kv`: K and V are stored in FP8, so the model gets their scales."""
    if checkpoint is None:
        raise NotTraceableError("it has no safetensors files, or they are not downloaded yet")
    register_attention()
    shapes, packed_linears = tensor_shapes(probed.model), probed.architecture.packed_linears
    try:
        traced = trace_model(settings, config, checkpoint, shapes, ATTN_IMPLEMENTATION, packed_linears)
        if has_fp8_kv:
            scales = find_kv_scales(settings.model, probed.architecture, checkpoint)
            trace_kv_scales(traced.model, probed.architecture, scales)
        return traced
    except OSError as error:
        raise translate_error(settings.model, error) from error


def _with_traced_weights(planned: PlannedModel) -> PlannedModel:
    """Trace the weights. If they cannot be traced, transformers loads them, and the plan has the reason."""
    try:
        return dataclasses.replace(planned, traced_model=trace_weights(planned))
    except NotTraceableError as error:
        decision = Decision("loading", "by transformers", str(error))
        plan = dataclasses.replace(planned.plan, decisions=(*planned.plan.decisions, decision))
        return dataclasses.replace(planned, plan=plan)


def resolve_programs(planned: PlannedModel, jit_reason: str = "", policy: SigningPolicy | None = None) -> PlannedModel:
    """Resolve `--programs auto` to packages or jit programs, for a start that begins now."""
    return resolve_planned(planned, partial(_package_folder, planned), jit_reason, policy)


def _package_folder(planned: PlannedModel, plan: Plan) -> Path:
    from tcdeploy.programs.aot import package_folder  # imports torch.export, which most starts do not need here

    return package_folder(plan.cache_dir, plan.key, op_source_digests(), torch_settings(), planned.fake_model)


class _ModelFacts(NamedTuple):
    """What `decide` reads of a model. checkpoint: None if there are no downloaded safetensors files."""

    config: PreTrainedConfig
    probed: ProbedModel
    checkpoint: Checkpoint | None
    tokenizer: Any


def _read_model(
    recipe: Recipe, environment: Environment, needs_tokenizer: bool, is_dry_run: bool, keeps_probe: bool = False
) -> _ModelFacts:
    """Raises ModelError with all reasons why the model cannot be served.

    Too little memory is one of them, unless in a dry run: the model may be planned for another machine.
    """
    refusals, probed, checkpoint, tokenizer = Refusals(recipe.model), None, None, None
    config = load_config(recipe, refusals)
    with refusals.collecting():
        probed = _probe(recipe, config, keeps_probe)
        if not refusals.reasons:  # a quantised checkpoint, for example, has other tensors than the probed model
            checkpoint = read_checkpoint(recipe, config, tensor_shapes(probed.model), not is_dry_run)
    with refusals.collecting():
        tokenizer = load_tokenizer(recipe) if needs_tokenizer else None
    is_stored_dense = not is_quantised(config) and recipe.quantize is None
    if refusals.reasons and probed is not None and not is_dry_run and is_stored_dense:
        with refusals.collecting():
            make_plan(recipe, environment, probed.architecture)
    refusals.raise_all()
    assert probed is not None
    return _ModelFacts(config, probed, checkpoint, tokenizer)


def _probe(recipe: Recipe, config: PreTrainedConfig, keeps_probe: bool) -> ProbedModel:
    """Probe the model, or take the one that `decide` has kept. A quantised one is not kept: `decide` changes it."""
    key = json.dumps(config_to_dict(config), sort_keys=True)
    if (kept := _kept_probe.pop(key, None)) is not None:
        return kept
    probed = probe_model(config, recipe.trust_remote_code, MECHANISMS.values())
    if keeps_probe and not (recipe.trust_remote_code or recipe.quantize or is_quantised(config)):
        _kept_probe[key] = probed
    return probed


def with_cxx_compiler(planned: PlannedModel, version: str) -> PlannedModel:
    """The model as planned for another version of the C++ compiler."""
    environment = dataclasses.replace(planned.environment, compiler=version)
    plan = make_plan(planned.recipe, environment, planned.architecture, planned.model_decisions)
    return dataclasses.replace(planned, environment=environment, plan=plan)


def origin_of(planned: PlannedModel) -> Origin:
    """What programs depend on besides the plan and the machine."""
    return Origin(
        recipe=dataclasses.asdict(planned.recipe), model_config=config_to_dict(planned.config),
        sources=op_source_digests(), torch_settings=torch_settings(), model_sources=model_sources(planned.fake_model),
    )  # fmt: skip


def require_caches(plan: Plan) -> None:
    """Raise UsageError if torch would neither find programs in the cache folder nor store them there."""
    settings = disabling_settings() if plan.programs == "jit" else []  # tcdeploy itself stores packages
    if settings:
        raise UsageError(
            f"{settings[0]} switches torch's compile caches off, so each start would compile every program, and the "
            f"cache folder {plan.cache_dir} would stay empty",
            f"unset {settings[0].partition('=')[0]}; to compile everything once more, use an empty --cache-dir",
        )
