"""Determines the Architecture of a model by running it on fake tensors and recording its calls of attention.

There is no list of model names. The model is built from its config on tensors without data (about 0.1 s for 8B) and
runs once. If the paged ops can serve its calls of attention, and mechanisms its other layers, they become an
`Architecture`; otherwise one error lists all reasons why the model is refused.

Rejected: reading head counts from the config. Attribute names differ between families, and no config says whether a
model calls the AttentionInterface at all, or passes a sink or a bias.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tcdeploy.errors import TcdeployError, UnsupportedArchitectureError, UnsupportedModelError
from tcdeploy.models.attention_calls import AttentionRecorder, check_layers, read_layers
from tcdeploy.models.auto_classes import auto_class, is_multimodal, model_class
from tcdeploy.models.convert.attention_interface import with_interface
from tcdeploy.models.convert.quantise_model import quantise_model
from tcdeploy.models.convert.scheme_experts import stacked_weights
from tcdeploy.models.convert.scheme_weight import SchemeWeight
from tcdeploy.models.convert.static_rope import freeze_rope
from tcdeploy.models.formats.methods import has_fp8_inputs, quantisation_method
from tcdeploy.models.formats.quantised_weight import LayerScheme
from tcdeploy.models.load import config_to_dict, quiet_transformers
from tcdeploy.models.positions import PositionTracer
from tcdeploy.models.probe_failure import CONFIG_HINT, UnexplainedFailureError, describe_exception, explaining_failures
from tcdeploy.models.refusals import Refusals
from tcdeploy.models.slot_layers import ProbedMechanism, SlotRecorder
from tcdeploy.models.weight_bytes import PROBE_DTYPE, weight_bytes
from tcdeploy.planning.architecture import Architecture, AttentionSpec, LayerState, digest_config
from tcdeploy.planning.memory import DTYPE_BYTES
from tcdeploy.torch_compat.dynamo import dispatch_mode
from tcdeploy.torch_compat.dynamo.dispatch_mode import observe_operations
from tcdeploy.torch_compat.dynamo.fake_tensors import fake_tensors, only_meta_tensors
from tcdeploy.torch_compat.transformers.experts_interface import supports_experts_interface

PROBE_ATTN_IMPLEMENTATION = "tcdeploy-probe"
PROBE_TOKENS = 13  # a prime that is no dimension of a model: models/positions.py recognises counts of tokens by it
log = logging.getLogger("tcdeploy.models")


@dataclass
class _LinearRecorder:
    """A forward pre-hook that records which linear layers read which tensor (by id), in call order.

    expert_elements: elements per token of the outputs that the widest experts hold at once.
    """

    readers: defaultdict[int, list[Any]] = field(default_factory=lambda: defaultdict(list))
    calls: Counter[int] = field(default_factory=Counter)
    keep_alive: list[Tensor] = field(default_factory=list)  # so that no id is reused
    expert_elements: int = 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.keep_alive.append(args[0])
        self.readers[id(args[0])].append(module)
        self.calls[id(module)] += 1

    def record_experts(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The hook of modules of experts. A token has a row for each of its top k experts in the outputs."""
        top_k_index = args[1] if len(args) > 1 else kwargs["top_k_index"]
        weights = {weight.name: weight for weight in stacked_weights(module)}
        if down := weights.get("down_proj"):
            widest = max(weight.rows for weight in weights.values())
            elements = top_k_index.shape[-1] * (down.columns + widest)
            self.expert_elements = max(self.expert_elements, elements)


class ProbedModel(NamedTuple):
    architecture: Architecture
    model: nn.Module  # with fake tensors


def probe_model(
    config: PreTrainedConfig, trust_remote_code: bool = False, mechanisms: Collection[ProbedMechanism] = ()
) -> ProbedModel:
    """The Architecture, and the model on tensors without data, whose quantised layers are converted.

    `mechanisms`: those that keep state in slots. Raises UnsupportedModelError.

    Unless the model is quantised or has remote code, it is probed on meta tensors first, and on fake tensors only if
    that fails.
    """
    if dispatch_mode.supported() and not trust_remote_code and not quantisation_method(config):
        with contextlib.suppress(Exception):
            return _probe(config, False, mechanisms, Refusals(config.model_type), only_meta_tensors())
    refusals = Refusals(config.model_type)
    try:
        return _probe(config, trust_remote_code, mechanisms, refusals, fake_tensors())
    except TcdeployError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        refusals.raise_all()  # the exception may be a consequence of these reasons
        message = f"the config of {config.model_type} has a value that cannot be used: {describe_exception(error)}"
        raise UnsupportedModelError(message, CONFIG_HINT) from error


def _probe(
    config: PreTrainedConfig,
    trust_remote_code: bool,
    mechanisms: Collection[ProbedMechanism],
    refusals: Refusals,
    without_data: contextlib.AbstractContextManager[None],
) -> ProbedModel:
    name, text_config = config.model_type, config.get_text_config()
    positions, linear_recorder = PositionTracer(PROBE_TOKENS), _LinearRecorder()
    slot_recorder = SlotRecorder(mechanisms, positions)
    with refusals.collecting():
        check_layers(config, slot_recorder.layer_types)
    model, layer_states = _record_layers(
        config, trust_remote_code, slot_recorder, positions, linear_recorder, refusals, without_data
    )
    if positions.counts_tokens or (model is not None and _numbers_tokens(model)):
        problem = "computes token positions of its own instead of using position_ids, so prompts cannot be packed"
        refusals.add(UnsupportedArchitectureError(f"{name} {problem}"))
    context = getattr(text_config, "max_position_embeddings", None) or 0
    if not context and not _has_no_attention(layer_states):
        refusals.add(UnsupportedArchitectureError(f"{name} has no max_position_embeddings in its config"))
    refusals.raise_all()
    assert model is not None
    packed_linears = _find_packed_linears(model, linear_recorder)
    architecture = Architecture(
        model_type=name,
        class_name=type(model).__name__,
        weight_bytes=_bytes_by_dtype(model),
        context=int(context),
        vocab_size=int(text_config.vocab_size),
        dtype=str(getattr(config, "dtype", None) or "").removeprefix("torch."),
        layer_states=layer_states,
        quantisation=quantisation_method(config) or "",
        fp8_inputs=has_fp8_inputs(config),
        is_multimodal=is_multimodal(config),
        rope_limit=_rope_limit(text_config),
        peak_activation_elements=_peak_activation_elements(linear_recorder, text_config),
        packed_linears=packed_linears,
        config_digest=digest_config(config_to_dict(config)),
    )
    return ProbedModel(architecture, model)


def quantise_probed(probed: ProbedModel, scheme_of: Callable[[str], LayerScheme | None]) -> ProbedModel:
    """The same model, whose linear layers and experts have these schemes, by path. Changes the fake model in place."""
    quantise_model(probed.model, scheme_of)
    weights = [module for module in probed.model.modules() if isinstance(module, SchemeWeight)]
    architecture = dataclasses.replace(
        probed.architecture, weight_bytes=_bytes_by_dtype(probed.model),
        schemes=dict(Counter(weight.scheme for weight in weights if not weight.experts)),
        expert_schemes=dict(Counter(weight.scheme for weight in weights if weight.experts)),
        largest_scheme_elements=_largest_scheme_elements(probed),
    )  # fmt: skip
    return ProbedModel(architecture, probed.model)


def _largest_scheme_elements(probed: ProbedModel) -> int:
    """See the field of Architecture. Of stacked experts it is one expert, since they are dequantised one at a time."""
    elements = {
        path: module.rows * module.in_features
        for path, module in probed.model.named_modules()
        if isinstance(module, SchemeWeight)
    }
    groups = [sum(elements.get(path, 0) for path in paths) for paths in probed.architecture.packed_linears]
    return max((*groups, *elements.values()), default=0)


def _bytes_by_dtype(model: nn.Module) -> dict[str, int]:
    return {dtype: sum(weight_bytes(model, dtype).values()) for dtype in DTYPE_BYTES}


def _record_layers(
    config: PreTrainedConfig,
    trust_remote_code: bool,
    slot_recorder: SlotRecorder,
    positions: PositionTracer,
    linear_recorder: _LinearRecorder,
    refusals: Refusals,
    without_data: contextlib.AbstractContextManager[None],
) -> tuple[nn.Module | None, tuple[LayerState, ...]]:
    """Build and run the model in the block `without_data`.

    Adds problems to `refusals`; the result is partial if there are any.
    """
    model: nn.Module | None = None
    recorder = AttentionRecorder(positions)
    ALL_ATTENTION_FUNCTIONS[PROBE_ATTN_IMPLEMENTATION] = recorder
    try:
        with quiet_transformers(), without_data, torch.no_grad(), refusals.collecting():
            try:
                model = _build(config, trust_remote_code)
                slot_recorder.install(model)
                _run(config.model_type, model, linear_recorder, positions, bool(slot_recorder.states))
            except UnexplainedFailureError as error:
                if not refusals.reasons:
                    raise
                log.debug("probably a consequence of another reason: %s", error)
            else:
                return model, read_layers(model, recorder, slot_recorder, config, refusals)
    finally:
        if model is not None:
            slot_recorder.remove(model)
        del ALL_ATTENTION_FUNCTIONS[PROBE_ATTN_IMPLEMENTATION]
    return model, ()


def _numbers_tokens(model: nn.Module) -> bool:
    """Whether an embedding can compute positions itself. It skips padding tokens, and starts at padding_idx + 1.

    In `generate`, Kosmos-2.5 gets no position_ids. With tcdeploy's positions, which start at 0, its logits differ.
    """
    return any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())


def _peak_activation_elements(recorder: _LinearRecorder, text_config: Any) -> int:
    """Peak number of live elements per token in a layer.

    The sum of the widest group of outputs that read one tensor, the widest input, and two hidden states (the residual
    and the block's input), all alive at once in the MLP. In a mixture of experts, the outputs of experts replace the
    first two if they are larger. The LM head is excluded, because only sampled rows pass through it. Experts whose
    class does not support transformers' interface are not recorded, so for them the result is too small.
    """
    vocab_size = text_config.vocab_size
    groups = [[layer for layer in readers if layer.out_features != vocab_size] for readers in recorder.readers.values()]
    widest_outputs = max((sum(layer.out_features for layer in readers) for readers in groups), default=0)
    widest_input = max((layer.in_features for readers in groups for layer in readers), default=0)
    return int(max(widest_outputs + widest_input, recorder.expert_elements) + 2 * text_config.hidden_size)


def _find_packed_linears(model: nn.Module, recorder: _LinearRecorder) -> tuple[tuple[str, ...], ...]:
    """Groups of two or more plain linear layers that read the same tensor and run once.

    A group belongs to one parent module, so a compiled region contains all of it, and all or none have a bias.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    groups: dict[tuple[int, str, bool], list[str]] = {}
    for tensor_id, readers in recorder.readers.items():
        for module in readers:
            if recorder.calls[id(module)] == 1:
                path = paths[id(module)]
                key = (tensor_id, path.rpartition(".")[0], module.bias is not None)
                groups.setdefault(key, []).append(path)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _has_no_attention(states: tuple[LayerState, ...]) -> bool:
    return bool(states) and not any(isinstance(state, AttentionSpec) for state in states)


def _rope_limit(text_config: Any) -> int:
    """`Architecture.rope_limit`."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    by_layer_type = [value for value in parameters.values() if isinstance(value, dict)]  # one per type of layer
    default = getattr(text_config, "original_max_position_embeddings", 0)
    limits = [
        int(rope.get("original_max_position_embeddings") or default or text_config.max_position_embeddings)
        for rope in (parameters, *by_layer_type)
        if rope.get("rope_type") == "longrope"
    ]
    if any(rope.get("rope_type") == "dynamic" and not rope.get("alpha") for rope in (parameters, *by_layer_type)):
        limits.append(int(text_config.max_position_embeddings))
    return min(filter(None, limits), default=0)


def _build(config: PreTrainedConfig, trust_remote_code: bool) -> nn.Module:
    """The model with fake tensors, in PROBE_DTYPE."""
    chosen_class, known_class = auto_class(config, trust_remote_code), model_class(config, trust_remote_code)
    if known_class is not None and known_class.forward is nn.Module.forward:
        message = f"{config.model_type} combines several models: {known_class.__name__} has no forward pass of its own"
        raise UnsupportedArchitectureError(message)
    # Some models read their weights while they initialise them. Code from a repository may use what torch.nn.init
    # returns, which is nothing without initialisation.
    with (
        explaining_failures(config.model_type, PROBE_ATTN_IMPLEMENTATION),
        contextlib.nullcontext() if trust_remote_code else no_init_weights(),
    ):

        def build(implementation: str) -> Any:
            return chosen_class.from_config(  # a copy: transformers stores attn_implementation in it
                copy.deepcopy(config),
                dtype=PROBE_DTYPE,
                attn_implementation=implementation,
                trust_remote_code=trust_remote_code,
            )

        model: Any = with_interface(known_class, PROBE_ATTN_IMPLEMENTATION, build).eval()
        model.tie_weights()  # otherwise done by the initialisation
        freeze_rope(model)
    return model  # type: ignore[no-any-return]


def _run(name: str, model: Any, linear_recorder: _LinearRecorder, positions: PositionTracer, has_slots: bool) -> None:
    """One forward pass over PROBE_TOKENS tokens."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.register_forward_pre_hook(linear_recorder)
        elif supports_experts_interface(module):
            module.register_forward_pre_hook(linear_recorder.record_experts, with_kwargs=True)
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.long)
    position_ids = torch.arange(PROBE_TOKENS)[None]
    positions.start(ids, position_ids)
    with (
        explaining_failures(name, PROBE_ATTN_IMPLEMENTATION, model, has_slots),
        observe_operations(positions.record),
    ):
        output = model(input_ids=ids, position_ids=position_ids, use_cache=False)
        positions.check(output.logits)
