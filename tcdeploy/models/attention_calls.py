"""Records a model's calls of attention on fake tensors, and checks whether the paged ops can serve them.

Each call becomes an AttentionSpec. Layers whose state a mechanism keeps are recorded by slot_layers.py. Layers that are
an MLP only, according to `layer_types` in the config, keep nothing. Other layers that do not attend, such as recurrent
ones without a mechanism, are refused by their type. All problems are collected, so that one error lists them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from tcdeploy.errors import UnsupportedArchitectureError
from tcdeploy.models.positions import PositionTracer
from tcdeploy.models.refusals import Refusals
from tcdeploy.models.slot_layers import SlotRecorder
from tcdeploy.planning.architecture import AttentionSpec, LayerState, NoState, SlotState

SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
STATELESS_LAYER_TYPES = {"mlp", "moe"}  # layers that compute each token on its own
SUPPORTED_KEYWORDS = {"scaling", "sliding_window", "softcap", "s_aux", "is_causal"}
IGNORED_KEYWORDS = {
    "dropout", "position_ids", "use_cache", "output_attentions", "cache_position", "output_hidden_states",
    "logits_to_keep",
}  # fmt: skip


@dataclass
class AttentionRecorder:
    """An attention function that records its calls by module, with their problems, and returns zeros."""

    positions: PositionTracer
    calls: dict[int, list[tuple[AttentionSpec, list[str]]]] = field(default_factory=dict)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        batch, heads, tokens, head_dim = query.shape  # K and V: [1, kv_heads, tokens, head_dim]
        problems = _keyword_problems(module, kwargs)
        if attention_mask is not None:
            problems.append("passes its own attention mask")
        if not tokens == key.shape[2] == self.positions.row_length:
            problems.append("attends to tokens other than the layer's input")
        spec = AttentionSpec(
            path="",
            heads=heads,
            kv_heads=key.shape[1],
            head_dim=head_dim,
            v_head_dim=value.shape[3],
            window=int(kwargs.get("sliding_window") or 0),
            softcap=float(kwargs.get("softcap") or 0.0),
            has_sinks=kwargs.get("s_aux") is not None,
        )
        self.calls.setdefault(id(module), []).append((spec, problems))
        output = query.new_zeros(batch, tokens, heads, value.shape[-1])
        self.positions.check(query, key, value)
        self.positions.copy_origins(output, query, key, value)
        return output, None


def _keyword_problems(module: nn.Module, keywords: dict[str, Any]) -> list[str]:
    """What the paged ops do not support, as phrases that follow the module's path."""
    problems = [
        f"passes {keyword} to attention, which the paged ops do not support"
        for keyword, argument in keywords.items()
        if keyword not in SUPPORTED_KEYWORDS | IGNORED_KEYWORDS and argument is not None and argument is not False
    ]
    if keywords.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        problems.append("is not causal")
    return problems


def refused_layers(config: PreTrainedConfig, slot_types: Collection[str]) -> dict[int, str]:
    """The layers of types that neither a KV cache nor a mechanism can serve: the type by layer number.

    These include types that differ from full attention only in the mask, because the recorded calls have no mask.
    `slot_types`: those of mechanisms, whose layers are compared with the claimed modules once the model has run.
    """
    supported = {*SUPPORTED_LAYER_TYPES, *STATELESS_LAYER_TYPES, *slot_types}
    return {number: name for number, name in enumerate(_layer_types(config)) if name not in supported}


def _layer_types(config: PreTrainedConfig) -> Sequence[str]:
    return getattr(config.get_text_config(), "layer_types", None) or ()


def _type_error(name: str, types: Iterable[str], classes: Iterable[str] = ()) -> UnsupportedArchitectureError:
    """`classes`: the classes of modules that no mechanism computes, if the model has been built."""
    message = f"{name} has layers of type {', '.join(sorted({*types}))}, which a KV cache cannot serve"
    if classes:
        message += f", and {', '.join(sorted({*classes}))} is not supported"
    return UnsupportedArchitectureError(message)


def check_layers(config: PreTrainedConfig, slot_types: Collection[str] = ()) -> None:
    """Raise UnsupportedArchitectureError for kinds of layers that the config names, before the model is built."""
    if types := refused_layers(config, slot_types):
        raise _type_error(config.model_type, types.values())
    text_config = config.get_text_config()
    shared = getattr(text_config, "num_kv_shared_layers", None)
    if isinstance(shared, int) and shared >= text_config.num_hidden_layers > 0:
        raise UnsupportedArchitectureError(
            f"{config.model_type} has no keys and values of its own: each of its {shared} layers attends to those of "
            "another model"
        )


def read_layers(
    model: nn.Module,
    recorder: AttentionRecorder,
    slot_recorder: SlotRecorder,
    config: PreTrainedConfig,
    refusals: Refusals,
) -> tuple[LayerState, ...]:
    """What each layer keeps, in the order of the model's modules. Adds what cannot be served to `refusals`."""
    name, skipped_layers = config.model_type, refused_layers(config, slot_recorder.layer_types)
    if not recorder.calls and not slot_recorder.calls:
        if not skipped_layers:
            of_mechanisms = refused_layers(config, ())
            never = UnsupportedArchitectureError(f"{name} never calls transformers' AttentionInterface")
            refusals.add(_type_error(name, of_mechanisms.values()) if of_mechanisms else never)
        return ()
    states: list[LayerState] = []
    problems: dict[str, str] = {}  # the first module that has it, by problem
    for path, module in model.named_modules():
        calls = recorder.calls.get(id(module), [])
        if len(calls) > 1:
            problems.setdefault(f"calls attention {len(calls)} times in one forward pass", path)
        for spec, found in calls:
            for problem in found:
                problems.setdefault(problem, path)
            states.append(replace(spec, path=path))
        if slot_calls := slot_recorder.calls[id(module)]:
            states.append(replace(slot_recorder.states[id(module)], path=path))
            if slot_calls > 1:
                problems.setdefault(f"runs {slot_calls} times in one forward pass", path)
    for problem, path in problems.items():
        refusals.add(UnsupportedArchitectureError(f"{name}: {path} {problem}"))
    with refusals.collecting():
        states = _with_stateless_layers(model, states, config)
        _check_each_layer(model, states, config, skipped_layers)
    with refusals.collecting():
        _check_windows(model, [state for state in states if isinstance(state, AttentionSpec)], config)
    return tuple(states)


def _with_stateless_layers(model: nn.Module, states: list[LayerState], config: PreTrainedConfig) -> list[LayerState]:
    """`states`, and those of layers that are an MLP only, in the order of the layers."""
    stack_path, _ = decoder_layer_position(model, states[0].path)
    with_state = {decoder_layer_position(model, state.path)[1] for state in states}
    stateless: list[LayerState] = [
        NoState(f"{stack_path}.{number}.{_first_block(model.get_submodule(f'{stack_path}.{number}'))}")
        for number, layer_type in enumerate(_layer_types(config))
        if layer_type in STATELESS_LAYER_TYPES and number not in with_state
    ]
    return sorted([*states, *stateless], key=lambda state: decoder_layer_position(model, state.path)[1])


def _first_block(layer: nn.Module) -> str:
    """The name of the first child that has a matrix; norms have vectors."""
    children = layer.named_children()
    return next(name for name, child in children if any(parameter.ndim >= 2 for parameter in child.parameters()))


def _check_each_layer(
    model: nn.Module, states: list[LayerState], config: PreTrainedConfig, skipped_layers: Collection[int]
) -> None:
    """Every decoder layer must have a LayerState, and a SlotState if its type is one that mechanisms serve.

    Otherwise, what the layer keeps is unknown.
    """
    name, of_mechanisms = config.model_type, refused_layers(config, ())
    stack_path, _ = decoder_layer_position(model, states[0].path)
    kinds = [(decoder_layer_position(model, path), kind) for path, kind in {(s.path, type(s)) for s in states}]
    layers = set(range(len(model.get_submodule(stack_path)))) - {*skipped_layers}  # type: ignore[arg-type]
    with_slots = {layer for (_, layer), kind in kinds if kind is SlotState}
    if unclaimed := layers & of_mechanisms.keys() - with_slots:
        modules = [model.get_submodule(f"{stack_path}.{layer}") for layer in unclaimed]
        classes = [type(module.get_submodule(_first_block(module))).__name__ for module in modules]
        raise _type_error(name, [of_mechanisms[layer] for layer in unclaimed], classes)
    positions = {position for position, _ in kinds}
    if missing := sorted(layer for layer in layers if (stack_path, layer) not in positions):
        raise UnsupportedArchitectureError(f"{name}: layers {missing} never call the AttentionInterface")
    if len({*kinds}) != len(kinds):
        raise UnsupportedArchitectureError(f"{name}: a layer calls attention or keeps state in more than one module")


def _check_windows(model: nn.Module, specs: list[AttentionSpec], config: PreTrainedConfig) -> None:
    """Reject windows that are only in the mask: without it the layer would attend beyond its window."""
    text_config = config.get_text_config()
    window = getattr(text_config, "sliding_window", None)
    context = getattr(text_config, "max_position_embeddings", None)
    if not window or not context or window >= context:
        return
    types = getattr(text_config, "layer_types", None)
    uses_window = getattr(text_config, "use_sliding_window", True)
    for spec in specs:
        _, layer = decoder_layer_position(model, spec.path)
        is_sliding = types[layer] == "sliding_attention" if types else uses_window
        if is_sliding and not spec.window:
            raise UnsupportedArchitectureError(
                f"{config.model_type}: {spec.path} has a sliding window of {window} but does not pass it to attention"
            )


def decoder_layer_position(model: nn.Module, attention_path: str) -> tuple[str, int]:
    """(path of the ModuleList, index) of the decoder layer that contains an attention module: ("model.layers", 3)."""
    names = attention_path.split(".")
    for cut in range(len(names) - 1, 0, -1):
        stack = model.get_submodule(".".join(names[:cut]))
        if isinstance(stack, nn.ModuleList) and names[cut].isdigit():
            return ".".join(names[:cut]), int(names[cut])
    raise UnsupportedArchitectureError(f"{attention_path} is not inside an nn.ModuleList of layers")
