"""Makes a runner's steps run compiled programs instead of the model's own code."""

from __future__ import annotations

from transformers import PreTrainedModel

from tcdeploy.cache.record.manifest import Origin
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.kernels.state.layer_state import state_names
from tcdeploy.planning.architecture import Architecture
from tcdeploy.planning.plan import Plan
from tcdeploy.programs.aot import AotForward, PackageExchange, package_folder
from tcdeploy.programs.jit import JitLoader
from tcdeploy.programs.programs import ProgramTable, compile_in_place
from tcdeploy.programs.regions import Region, find_head_modules, find_layers, regions_to_compile
from tcdeploy.programs.traced_layers import TracedLayer


def install_programs(
    runner: ModelRunner, architecture: Architecture, origin: Origin, cache_dir: str, original_key: str | None = None,
    exchange: PackageExchange = PackageExchange(),  # noqa: B008 - immutable
) -> None:  # fmt: skip
    """Make the runner's steps run compiled programs, which are loaded or compiled when they are first called.

    `original_key`: if the model is a compile worker's short copy, the key of the plan of the whole model; else None.
    """
    plan, model = runner.plan, runner.model
    if plan.programs == "aot":
        folder = package_folder(cache_dir, original_key or plan.key, origin.sources, origin.torch_settings, model)
        layers = traced_layers(model, architecture)
        is_copy = original_key is not None
        runner.forward = AotForward(runner.transformers_forward, layers, plan, folder, is_copy, exchange)
        return
    regions = regions_of(model, plan, architecture)
    compile_in_place(regions, ProgramTable(JitLoader(plan, len(regions))), runner.step_holder)


def traced_layers(model: PreTrainedModel, architecture: Architecture) -> list[TracedLayer]:
    """The model's layers, which are exported as programs."""
    paths = (state.path for state in architecture.layer_states)
    names = dict(zip(paths, state_names(architecture), strict=True))
    return [
        TracedLayer(
            layer.module,
            layer.path,
            tuple(model.get_submodule(state.path).tcdeploy for state in layer.states),
            tuple(name for state in layer.states for name in names[state.path]),
            layer.kind,
        )
        for layer in find_layers(model, architecture)
    ]


def regions_of(model: PreTrainedModel, plan: Plan, architecture: Architecture) -> list[Region]:
    """The regions to compile. Head modules are added if the whole step is one CUDA graph."""
    layers = find_layers(model, architecture)
    head_modules = find_head_modules(model, layers) if plan.graphs == "step" else []
    return [*regions_to_compile(layers, plan.region), *head_modules]
