"""Determines the Architecture of a model by running it on fake tensors and recording its calls of attention.

There is no list of model names. The model is built from its config under FakeTensorMode (no memory, about 0.1 s for
8B), one forward pass runs, and a recording attention function stores each call. Calls that the paged ops can serve
become an `Architecture`; any other raises UnsupportedModelError with the module and the reason.

Rejected: reading head counts from the config. Attribute names differ between families, and no config says whether a
model calls the AttentionInterface at all, or passes a sink or a bias.
"""

from __future__ import annotations

import contextlib
import copy
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tcdeploy.errors import TcdeployError, UnsupportedModelError
from tcdeploy.models.auto_classes import HINT, auto_class, is_multimodal
from tcdeploy.models.checkpoint import ExpectedTensors, expected_tensors
from tcdeploy.models.load import config_to_dict, quiet_transformers
from tcdeploy.models.load_errors import exception_chain, missing_package_error, missing_packages
from tcdeploy.models.positions import PositionTracer
from tcdeploy.models.quantisation import quantisation_method
from tcdeploy.models.static_rope import freeze_rope
from tcdeploy.planning.architecture import Architecture, AttentionSpec, digest_config
from tcdeploy.planning.memory import DTYPE_BYTES
from tcdeploy.torch_compat.attention_registry import unregister_attention
from tcdeploy.torch_compat.dispatch_mode import observe_operations
from tcdeploy.torch_compat.fake_tensors import fake_tensors
from tcdeploy.torch_compat.float32_tensors import float32_tensors

PROBE_ATTN_IMPLEMENTATION = "tcdeploy-probe"
PROBE_DTYPE = torch.bfloat16  # grouped expert GEMMs support no other dtype on fake tensors
VALUE_ERROR, SIZE_ERROR = "DataDependentOutputException", "DynamicOutputShapeException"  # of torch's fake tensors
EXPLAIN_HINT = "tcdeploy explain MODEL shows the line and its cure"
PROBE_TOKENS = 13  # a prime that is no dimension of a model: models/positions.py recognises counts of tokens by it
SUPPORTED_LAYER_TYPES = {"full_attention", "sliding_attention"}
SUPPORTED_ATTENTION_KWARGS = {"scaling", "sliding_window", "softcap", "s_aux", "is_causal"}
IGNORED_ATTENTION_KWARGS = {
    "dropout",
    "position_ids",
    "use_cache",
    "output_attentions",
    "cache_position",
    "output_hidden_states",
    "logits_to_keep",
}


@dataclass
class _AttentionRecorder:
    """An attention function that records its calls by module and returns zeros."""

    positions: PositionTracer
    calls: dict[int, list[tuple[nn.Module, Tensor, Tensor, Tensor, Any, dict[str, Any]]]] = field(default_factory=dict)

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        self.calls.setdefault(id(module), []).append((module, query, key, value, attention_mask, kwargs))
        batch, heads, tokens, _ = query.shape
        output = query.new_zeros(batch, tokens, heads, value.shape[-1])
        self.positions.check(query, key, value)
        self.positions.copy_origins(output, query, key, value)
        return output, None


@dataclass
class _LinearRecorder:
    """A forward pre-hook that records which linear layers read which tensor (by id), in call order."""

    readers: dict[int, list[Any]] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    keep_alive: list[Tensor] = field(default_factory=list)  # so that no id is reused

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.keep_alive.append(args[0])
        self.readers.setdefault(id(args[0]), []).append(module)
        self.calls[id(module)] = self.calls.get(id(module), 0) + 1


class ProbedModel(NamedTuple):
    architecture: Architecture
    tensors: ExpectedTensors
    model: nn.Module  # with fake tensors


def probe(config: PreTrainedConfig, trust_remote_code: bool = False) -> Architecture:
    """The Architecture of the causal LM that `config` describes. Raises UnsupportedModelError with the reason."""
    return probe_model(config, trust_remote_code).architecture


def probe_model(config: PreTrainedConfig, trust_remote_code: bool = False) -> ProbedModel:
    """The Architecture, the tensors that a checkpoint contains, and the model with fake tensors.

    Raises UnsupportedModelError.
    """
    try:
        return _probe(config, trust_remote_code)
    except TcdeployError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"the config of {config.model_type} has a value that cannot be used: {error}",
            "check config.json; TCDEPLOY_DEBUG=1 shows the traceback",
        ) from error


def _probe(config: PreTrainedConfig, trust_remote_code: bool) -> ProbedModel:
    name = config.model_type
    _check_layer_types(config)
    positions = PositionTracer(PROBE_TOKENS)
    recorder = _AttentionRecorder(positions)
    ALL_ATTENTION_FUNCTIONS.register(PROBE_ATTN_IMPLEMENTATION, recorder)
    linear_recorder = _LinearRecorder()
    try:
        model = _run_on_fake_tensors(config, name, trust_remote_code, linear_recorder, positions)
    finally:
        unregister_attention(PROBE_ATTN_IMPLEMENTATION)
    attention_layers = _read_calls(model, recorder, name)
    _check_all_layers_attend(model, attention_layers, name)
    if positions.counts_tokens:
        raise UnsupportedModelError(
            f"{name} computes token positions of its own instead of using position_ids, so prompts cannot be packed",
            HINT,
        )
    text_config = config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None)
    if not context:
        raise UnsupportedModelError(f"{name} has no max_position_embeddings in its config", HINT)
    _check_windows(text_config, attention_layers, name)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    architecture = Architecture(
        model_type=name,
        class_name=type(model).__name__,
        parameters=parameters,
        context=int(context),
        vocab_size=int(text_config.vocab_size),
        dtype=str(getattr(config, "dtype", None) or "").removeprefix("torch."),
        attention_layers=attention_layers,
        extra_weight_bytes={
            dtype: _weight_bytes(model, dtype) - parameters * size for dtype, size in DTYPE_BYTES.items()
        },
        quantisation=quantisation_method(config) or "",
        is_multimodal=is_multimodal(config),
        rope_limit=_rope_limit(text_config),
        peak_activation_elements=_peak_activation_elements(linear_recorder, text_config),
        packed_linears=_find_packed_linears(model, linear_recorder),
        config_digest=digest_config(config_to_dict(config)),
    )
    return ProbedModel(architecture, expected_tensors(model), model)


def _weight_bytes(model: nn.Module, dtype: str) -> int:
    """Bytes of the parameters and buffers of a model that was built in PROBE_DTYPE, if it is loaded in `dtype`.

    Tensors of other dtypes keep them: the modelling code sets them, as it does for rotary frequencies.
    """
    in_float32 = float32_tensors(model, getattr(torch, dtype))
    size_bytes = 0
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):  # each tied tensor once
        if name in in_float32:
            element_bytes = DTYPE_BYTES["float32"]
        else:
            element_bytes = DTYPE_BYTES[dtype] if tensor.dtype == PROBE_DTYPE else tensor.element_size()
        size_bytes += tensor.numel() * element_bytes
    return size_bytes


def _peak_activation_elements(recorder: _LinearRecorder, text_config: Any) -> int:
    """Peak number of live elements per token in a layer.

    The sum of the widest group of outputs that read one tensor, the widest input, and two hidden states (the residual
    and the block's input), all alive at once in the MLP. The LM head is excluded, because only sampled rows pass
    through it. Experts that are not linear layers are not recorded, so for them the result is too small.
    """
    vocab_size = text_config.vocab_size
    groups = [[layer for layer in readers if layer.out_features != vocab_size] for readers in recorder.readers.values()]
    groups = [readers for readers in groups if readers]
    widest_outputs = max((sum(layer.out_features for layer in readers) for readers in groups), default=0)
    widest_input = max((readers[0].in_features for readers in groups), default=0)
    return int(widest_outputs + widest_input + 2 * text_config.hidden_size)


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


def _check_layer_types(config: PreTrainedConfig) -> None:
    """Reject layer types that differ only in the mask transformers builds; their calls look like full attention."""
    text_config = config.get_text_config()
    for layer_type in getattr(text_config, "layer_types", None) or ():
        if layer_type not in SUPPORTED_LAYER_TYPES:
            raise UnsupportedModelError(
                f"{config.model_type} has layers of type {layer_type}, which a KV cache cannot serve", HINT
            )


def _check_windows(text_config: Any, attention_layers: tuple[AttentionSpec, ...], name: str) -> None:
    """Reject windows that are only in the mask: without it the layer would attend beyond its window."""
    window = getattr(text_config, "sliding_window", None)
    if not window or window >= text_config.max_position_embeddings:
        return
    types = getattr(text_config, "layer_types", None)
    uses_window = getattr(text_config, "use_sliding_window", True)
    for number, spec in enumerate(attention_layers):
        is_sliding = types[number] == "sliding_attention" if types else uses_window
        if is_sliding and not spec.window:
            raise UnsupportedModelError(
                f"{name}: {spec.path} has a sliding window of {window} but does not pass it to attention", HINT
            )


def _run_on_fake_tensors(
    config: PreTrainedConfig,
    name: str,
    trust_remote_code: bool,
    linear_recorder: _LinearRecorder,
    positions: PositionTracer,
) -> nn.Module:
    """Build and call the model on fake tensors, in PROBE_DTYPE."""
    model_class = auto_class(config, trust_remote_code)
    try:
        with quiet_transformers(), fake_tensors(), torch.no_grad():
            # Some models read their weights while they initialise them. Code from a repository may use what
            # torch.nn.init returns, which is nothing without initialisation.
            with contextlib.nullcontext() if trust_remote_code else no_init_weights():
                model = model_class.from_config(  # a copy: transformers stores attn_implementation in it
                    copy.deepcopy(config),
                    dtype=PROBE_DTYPE,
                    attn_implementation=PROBE_ATTN_IMPLEMENTATION,
                    trust_remote_code=trust_remote_code,
                ).eval()
            model.tie_weights()  # otherwise done by the initialisation
            freeze_rope(model)
            for module in model.modules():
                if type(module) is nn.Linear:
                    module.register_forward_pre_hook(linear_recorder)
            ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.long)
            position_ids = torch.arange(PROBE_TOKENS)[None]
            positions.start(ids, position_ids)
            with observe_operations(positions.record):
                output = model(input_ids=ids, position_ids=position_ids, use_cache=False)
            positions.check(output.logits)
    except KeyError as error:
        if PROBE_ATTN_IMPLEMENTATION in str(error):
            raise UnsupportedModelError(
                f"{name} does not look its attention up in the AttentionInterface", HINT
            ) from error
        raise UnsupportedModelError(f"{name} cannot be run on fake tensors: KeyError {error}", HINT) from error
    except Exception as error:
        if packages := missing_packages(list(exception_chain(error))):
            raise missing_package_error(name, packages) from error
        hint = EXPLAIN_HINT if type(error).__name__ in (VALUE_ERROR, SIZE_ERROR) else HINT
        raise UnsupportedModelError(f"{name} {_describe_failure(error)}", hint) from error
    return model


def _describe_failure(error: Exception) -> str:
    """A phrase that explains why the forward pass on fake tensors raised `error`; it follows the model's name."""
    reason = str(error).strip().split("\n")[0][:200]
    if arguments := re.search(r"forward\(\) missing \d+ required positional arguments?: (.+)", reason):
        return f"requires inputs other than text: {arguments[1]}"
    kind = type(error).__name__
    if kind == VALUE_ERROR:
        reason = f"its forward pass reads values of tensors on the host ({reason})"
    if kind == SIZE_ERROR:
        reason = f"its forward pass has tensors whose size depends on values of other tensors ({reason})"
    return f"cannot be run on fake tensors, so it cannot be traced: {reason}"


def _read_calls(model: nn.Module, recorder: _AttentionRecorder, name: str) -> tuple[AttentionSpec, ...]:
    if not recorder.calls:
        raise UnsupportedModelError(f"{name} never calls transformers' AttentionInterface", HINT)
    specs = []
    for path, module in model.named_modules():
        calls = recorder.calls.get(id(module), [])
        if len(calls) > 1:
            raise UnsupportedModelError(f"{name}: {path} calls attention {len(calls)} times in one forward pass", HINT)
        for call in calls:
            specs.append(_read_call(path, name, *call))
    return tuple(specs)


def _read_call(
    path: str,
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    kwargs: dict[str, Any],
) -> AttentionSpec:
    for keyword, argument in kwargs.items():
        if (
            keyword not in SUPPORTED_ATTENTION_KWARGS | IGNORED_ATTENTION_KWARGS
            and argument is not None
            and argument is not False
        ):
            raise UnsupportedModelError(
                f"{name}: {path} passes {keyword} to attention, which the paged ops do not support", HINT
            )
    if mask is not None:
        raise UnsupportedModelError(f"{name}: {path} passes its own attention mask", HINT)
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError(f"{name}: {path} is not causal", HINT)
    if query.shape[2] != PROBE_TOKENS or key.shape[2] != PROBE_TOKENS:
        raise UnsupportedModelError(f"{name}: {path} attends to tokens other than the layer's input", HINT)
    return AttentionSpec(
        path=path,
        heads=query.shape[1],
        kv_heads=key.shape[1],
        head_dim=query.shape[3],
        v_head_dim=value.shape[3],
        window=int(kwargs.get("sliding_window") or 0),
        softcap=float(kwargs.get("softcap") or 0.0),
        has_sinks=kwargs.get("s_aux") is not None,
    )


def _check_all_layers_attend(model: nn.Module, attention_layers: tuple[AttentionSpec, ...], name: str) -> None:
    """Every decoder layer must use the interface; one that does not has state outside the KV cache."""
    stack_path, _ = decoder_layer_position(model, attention_layers[0].path)
    attending = {decoder_layer_position(model, attention.path) for attention in attention_layers}
    missing = [index for index in range(len(model.get_submodule(stack_path))) if (stack_path, index) not in attending]  # type: ignore[arg-type]
    if missing:
        raise UnsupportedModelError(f"{name}: layers {missing} never call the AttentionInterface", HINT)
    if len(attending) != len(attention_layers):
        raise UnsupportedModelError(f"{name}: a layer calls attention from more than one module", HINT)


def decoder_layer_position(model: nn.Module, attention_path: str) -> tuple[str, int]:
    """(path of the ModuleList, index) of the decoder layer that contains an attention module: ("model.layers", 3)."""
    names = attention_path.split(".")
    for cut in range(len(names) - 1, 0, -1):
        stack = model.get_submodule(".".join(names[:cut]))
        if isinstance(stack, nn.ModuleList) and names[cut].isdigit():
            return ".".join(names[:cut]), int(names[cut])
    raise UnsupportedModelError(f"{attention_path} is not inside an nn.ModuleList of layers", HINT)
