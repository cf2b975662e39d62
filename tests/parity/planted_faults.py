"""Fault injection for the parity check: faults in the step of a model that it must find.

A fault modifies the model after the reference is computed and before the buckets are compiled, so the check sees what
it would see of a wrong kernel, graph pass or block table. `planted(fault)` patches `prepare` to do so.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tcdeploy.engine.check.parity_check import ParityChecker
from tcdeploy.engine.step.runner import ModelRunner
from tcdeploy.engine.warm import program_setup
from tcdeploy.kernels.attention.interface import ATTN_IMPLEMENTATION, paged_attention
from tcdeploy.kernels.attention.metadata import AttentionMetadata, DecodeMetadata
from tcdeploy.kernels.attention.ops import HOST_SCALARS
from tcdeploy.planning.architecture import Architecture
from tcdeploy.programs.regions import find_layers
from tcdeploy.start import model_code


class NotApplicable(Exception):
    """The model lacks what the fault changes."""


@dataclasses.dataclass
class Target:
    """The model that a fault is planted into."""

    runner: ModelRunner
    architecture: Architecture

    @property
    def model(self) -> nn.Module:
        return self.runner.model

    @property
    def layers(self) -> list[nn.Module]:
        return [layer.module for layer in find_layers(self.model, self.architecture)]

    @property
    def middle_layer(self) -> nn.Module:
        return self.layers[len(self.layers) // 2]

    def find(self, *names: str, root: nn.Module | None = None) -> list[nn.Module]:
        """Modules with one of these names. Raises NotApplicable if there is none."""
        named_modules = (root or self.model).named_modules()
        modules = [module for path, module in named_modules if path.rpartition(".")[2] in names]
        if not modules:
            raise NotApplicable(f"no module is named {' or '.join(names)}")
        return modules


Plant = Callable[[Target], None]


def change_attention(target: Target, change: Callable[..., tuple[Any, ...]]) -> None:
    """Pass what `change(module, query, key, value, arguments)` returns to attention."""

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        query, key, value, kwargs = change(module, query, key, value, kwargs)
        return paged_attention(module, query, key, value, attention_mask, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(ATTN_IMPLEMENTATION, attention)


def change_metadata(target: Target, change: Callable[[AttentionMetadata], AttentionMetadata]) -> None:
    runner: Any = target.runner
    make_step = runner._make_step

    def changed(*args: Any) -> Any:
        step = make_step(*args)
        step.attention_metadata = change(step.attention_metadata)
        return step

    runner._make_step = changed


def change_arguments(target: Target, change: Callable[[Any, dict[str, Any]], None]) -> None:
    """Let `change(step, arguments)` change the arguments of the whole model."""

    def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        step = target.runner.step_holder.step
        if step is not None:
            change(step, kwargs)
        return args, kwargs

    target.model.register_forward_pre_hook(hook, with_kwargs=True)


def wrong_attention_scale(target: Target) -> None:
    def change(module: Any, query: Any, key: Any, value: Any, kwargs: Any) -> Any:
        return query, key, value, {**kwargs, "scaling": 1.25 * (kwargs.get("scaling") or query.shape[-1] ** -0.5)}

    change_attention(target, change)


def off_by_one_position(target: Target) -> None:
    """In decode, relative to the keys in the cache."""

    def change(step: Any, kwargs: dict[str, Any]) -> None:
        if step.attention_metadata.prefill is None:
            kwargs["position_ids"] = kwargs["position_ids"] + 1

    change_arguments(target, change)


def missing_attention_softcap(target: Target) -> None:
    if not any(spec.softcap for spec in target.architecture.attention_layers):
        raise NotApplicable("attention is not soft-capped")

    def change(module: Any, query: Any, key: Any, value: Any, kwargs: Any) -> Any:
        return query, key, value, {**kwargs, "softcap": None}

    change_attention(target, change)


def missing_logits_softcap(target: Target) -> None:
    config: Any = target.model.config
    if not getattr(config, "final_logit_softcapping", None):
        raise NotApplicable("logits are not soft-capped")
    config.final_logit_softcapping = None


def missing_sinks(target: Target) -> None:
    if not any(spec.has_sinks for spec in target.architecture.attention_layers):
        raise NotApplicable("attention has no sinks")

    def change(module: Any, query: Any, key: Any, value: Any, kwargs: Any) -> Any:
        return query, key, value, {**kwargs, "s_aux": torch.full_like(kwargs["s_aux"], -1e4)}

    change_attention(target, change)


def _roll_heads(target: Target, names: tuple[str, ...]) -> None:
    """Move the rows of projections in the middle layer's attention by one head."""
    spec = target.architecture.attention_layers[len(target.layers) // 2]
    attention = target.model.get_submodule(spec.path)
    for module in target.find(*names, root=attention):
        weight: Any = module.weight
        weight.copy_(weight.roll(spec.head_dim, dims=0))


def swapped_heads_in_one_layer(target: Target) -> None:
    spec = target.architecture.attention_layers[0]
    if spec.heads == spec.kv_heads:
        raise NotApplicable("attention is not grouped")
    _roll_heads(target, ("q_proj",))


def swapped_kv_heads_in_one_layer(target: Target) -> None:
    if target.architecture.attention_layers[0].kv_heads < 2:
        raise NotApplicable("attention has one head of keys")
    _roll_heads(target, ("k_proj",))


def residual_dropped_in_one_layer(target: Target) -> None:
    layer: Any = target.middle_layer
    forward = type(layer).forward

    def changed(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(layer, hidden_states, *args, **kwargs)
        return (output[0] - hidden_states, *output[1:]) if isinstance(output, tuple) else output - hidden_states

    layer.forward = changed


def layer_skipped(target: Target) -> None:
    layer: Any = target.middle_layer
    forward = type(layer).forward

    def changed(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = forward(layer, hidden_states, *args, **kwargs)  # keys and values are written
        return (hidden_states, *output[1:]) if isinstance(output, tuple) else hidden_states.clone()

    layer.forward = changed


def window_off_by_one(target: Target) -> None:
    if not any(spec.window for spec in target.architecture.attention_layers):
        raise NotApplicable("attention has no window")

    def change(module: Any, query: Any, key: Any, value: Any, kwargs: Any) -> Any:
        window = kwargs.get("sliding_window")
        return query, key, value, {**kwargs, "sliding_window": window + 1 if window else window}

    change_attention(target, change)


def wrong_rope_base(target: Target) -> None:
    """As if the base were its square root."""
    modules = [module for module in target.model.modules() if hasattr(module, "inv_freq")]
    tables = [
        buffer
        for module in target.model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and "original" not in name
    ]
    if not modules and not tables:
        raise NotApplicable("the model has no rotary embedding")
    for table in tables:
        table.copy_(table.sqrt())


def last_full_block(target: Target, decode: DecodeMetadata) -> int:
    """A block of the first sequence that it attends to even with a sliding window: the last one before the newest."""
    return max((int(decode.seq_lens[0]) - 1) // target.runner.plan.block_size - 1, 0)


def stale_kv_block(target: Target) -> None:
    """A block of the first sequence of a decode batch has keys and values of an earlier sequence."""

    def change(step: Any, kwargs: dict[str, Any]) -> None:
        decode = step.attention_metadata.decode
        if step.attention_metadata.prefill is None:
            number = last_full_block(target, decode)
            block = decode.block_table[0, number : number + 1].long()
            for spec in target.architecture.attention_layers:
                binding: Any = target.model.get_submodule(spec.path).tcdeploy
                for cache in binding.state:
                    cache.index_copy_(0, block, cache.index_select(0, block).roll(1, dims=-1))

    change_arguments(target, change)


def change_block_table(target: Target, min_rows: int, change: Callable[[Tensor, DecodeMetadata], None]) -> None:
    """Let `change` modify the block table [rows, blocks] of decode batches of at least `min_rows` rows."""

    def change_decode(metadata: AttentionMetadata) -> AttentionMetadata:
        decode = metadata.decode
        if decode is None or metadata.prefill is not None or decode.block_table.shape[0] < min_rows:
            return metadata
        table = decode.block_table.clone()
        change(table, decode)
        return metadata._replace(decode=decode._replace(block_table=table))

    change_metadata(target, change_decode)


def block_of_another_sequence(target: Target) -> None:
    """The first sequence of a decode batch reads the first block of the second in place of one of its own."""

    def change(table: Tensor, decode: DecodeMetadata) -> None:
        table[0, last_full_block(target, decode)] = table[1, 0]

    change_block_table(target, 2, change)


def later_block_of_another_sequence(target: Target) -> None:
    """All sequences of a decode batch but the first read the first block of the first instead of their second."""

    def change(table: Tensor, decode: DecodeMetadata) -> None:
        table[1:, 1] = table[0, 0]

    change_block_table(target, 2, change)


def blocks_of_another_sequence(target: Target) -> None:
    """The second sequence of a decode batch reads all blocks of the fifth."""

    def change(table: Tensor, decode: DecodeMetadata) -> None:
        table[1] = table[4]

    change_block_table(target, 5, change)


def last_token_not_attended(target: Target) -> None:
    def change(metadata: AttentionMetadata) -> AttentionMetadata:
        if metadata.decode is None or metadata.prefill is not None:
            return metadata
        lengths = (metadata.decode.seq_lens - 1).clamp(min=0)
        return metadata._replace(decode=metadata.decode._replace(seq_lens=lengths))

    change_metadata(target, change)


def kv_in_the_wrong_slot(target: Target) -> None:
    """Keys and values of a prefill are written one slot too far."""

    def change(metadata: AttentionMetadata) -> AttentionMetadata:
        prefill = metadata.prefill
        if prefill is None:
            return metadata
        return metadata._replace(prefill=prefill._replace(slot_mapping=prefill.slot_mapping.roll(1)))

    change_metadata(target, change)


def wrong_norm_epsilon(target: Target) -> None:
    """0.1 in all norms."""
    changed = 0
    for module in target.model.modules():
        for name in ("variance_epsilon", "eps"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.1)
                changed += 1
    if not changed:
        raise NotApplicable("no norm has an epsilon")


def norm_weight_dropped(target: Target) -> None:
    """The first norm of the middle layer does not scale."""
    norm: Any = next(module for name, module in target.middle_layer.named_children() if "norm" in name or "ln" in name)
    neutral = 0.0 if norm.weight.mean() < 0.5 else 1.0
    norm.weight.data.fill_(neutral)


def embedding_scale_dropped(target: Target) -> None:
    embeddings = [module for module in target.model.modules() if hasattr(module, "embed_scale")]
    if not embeddings:
        raise NotApplicable("embeddings are not scaled")
    for embedding in embeddings:
        embedding.embed_scale = torch.ones_like(torch.as_tensor(embedding.embed_scale))


def bias_dropped(target: Target) -> None:
    """In the attention of the middle layer."""
    biases = [
        parameter
        for module in target.middle_layer.modules()
        for name, parameter in [*vars(module).get("_parameters", {}).items()]
        if name in ("bias", "packed_bias") and parameter is not None and not hasattr(module, "normalized_shape")
    ]
    if not biases:
        raise NotApplicable("linear layers have no bias")
    biases[0].data.zero_()


def experts_swapped(target: Target) -> None:
    """All experts of the middle layer are off by one."""
    weights = [
        parameter
        for name, parameter in target.middle_layer.named_parameters()
        if "expert" in name and name.endswith("gate_up_proj")
    ]
    if not weights:
        raise NotApplicable("the model has no experts")
    weights[0].data.copy_(weights[0].data.roll(1, dims=0))


def gate_and_up_swapped(target: Target) -> None:
    mlp = _parent_of(target.middle_layer, "gate_proj")
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def _parent_of(root: nn.Module, name: str) -> Any:
    for module in root.modules():
        if name in dict(module.named_children()):
            return module
    raise NotApplicable(f"no module is named {name}")


def wrong_activation(target: Target) -> None:
    """In the middle layer: GELU instead of SiLU, or the other way round."""
    for module in target.middle_layer.modules():
        for name in ("act_fn", "act", "activation_fn"):
            activation = getattr(module, name, None)
            if isinstance(activation, nn.Module):
                setattr(module, name, nn.GELU() if "silu" in type(activation).__name__.lower() else nn.SiLU())
                return
    raise NotApplicable("no module holds its activation function")


def wrong_row_sampled(target: Target) -> None:
    """Prefill returns the logits after the token before the last."""

    def change(step: Any, kwargs: dict[str, Any]) -> None:
        if step.attention_metadata.prefill is not None and isinstance(kwargs.get("logits_to_keep"), Tensor):
            kwargs["logits_to_keep"] = (kwargs["logits_to_keep"] - 1).clamp(min=0)

    change_arguments(target, change)


def _rows_of_mixed_step(metadata: AttentionMetadata) -> int:
    """The number of sequences that decode in a prefill step; 0 in other steps."""
    prefill = metadata.prefill
    return 0 if prefill is None else int(prefill.host_scalars[HOST_SCALARS.index("decoding")])


def rows_swapped_in_mixed_steps(target: Target) -> None:
    """The first two decode rows beside a prompt read each other's blocks."""

    def change(metadata: AttentionMetadata) -> AttentionMetadata:
        decode = metadata.decode
        if decode is None or not _rows_of_mixed_step(metadata):
            return metadata
        table = decode.block_table.clone()
        table[:2] = decode.block_table[:2].flip(0)
        return metadata._replace(decode=decode._replace(block_table=table))

    change_metadata(target, change)


def row_positions_off_by_one_in_mixed_steps(target: Target) -> None:
    def change(step: Any, kwargs: dict[str, Any]) -> None:
        if rows := _rows_of_mixed_step(step.attention_metadata):
            positions = kwargs["position_ids"].clone()
            positions[:, :rows] += 1
            kwargs["position_ids"] = positions

    change_arguments(target, change)


def row_tokens_swapped_in_mixed_steps(target: Target) -> None:
    """The first two decode rows beside a prompt get each other's tokens."""

    def change(step: Any, kwargs: dict[str, Any]) -> None:
        if _rows_of_mixed_step(step.attention_metadata):
            tokens = kwargs["input_ids"].clone()
            tokens[:, :2] = kwargs["input_ids"][:, :2].flip(1)
            kwargs["input_ids"] = tokens

    change_arguments(target, change)


FAULTS: dict[str, Plant] = {
    plant.__name__.replace("_", " "): plant
    for plant in (
        wrong_attention_scale, off_by_one_position, missing_attention_softcap, missing_logits_softcap, missing_sinks,
        swapped_heads_in_one_layer, swapped_kv_heads_in_one_layer, residual_dropped_in_one_layer, layer_skipped,
        window_off_by_one, wrong_rope_base, stale_kv_block, block_of_another_sequence, later_block_of_another_sequence,
        blocks_of_another_sequence, last_token_not_attended,
        kv_in_the_wrong_slot, wrong_norm_epsilon, norm_weight_dropped, embedding_scale_dropped, bias_dropped,
        experts_swapped, gate_and_up_swapped, wrong_activation, wrong_row_sampled, rows_swapped_in_mixed_steps,
        row_positions_off_by_one_in_mixed_steps, row_tokens_swapped_in_mixed_steps,
    )
}  # fmt: skip


@contextlib.contextmanager
def planted(
    fault: Plant | None, first_reference: list[Any] | None = None, uses_stored_reference: bool = False
) -> Iterator[None]:
    """Within the block, `prepare` builds a model with the fault.

    Raises NotApplicable if the model lacks what the fault changes.

    `first_reference`: the prompts and reference of the first attempt on an equal model, or a list to add them to.
    `uses_stored_reference`: compare with a reference in the cache folder, if there is one.
    """
    known = [] if first_reference is None else first_reference
    compile_in_place = program_setup.compile_in_place
    targets: list[Target] = []

    class PlantingChecker(ParityChecker):
        def __init__(
            self, runner: ModelRunner, architecture: Architecture, config: Any, stored: Any = None, **rest: Any
        ) -> None:
            super().__init__(runner, architecture, config, stored if uses_stored_reference else None, **rest)
            targets.append(Target(runner, architecture))

        def _prompts_and_reference(self, number: int, *rest: Any) -> Any:
            if number == 0 and known and not self._attempts and not uses_stored_reference:
                self._attempts.append(known[0])
            result = super()._prompts_and_reference(number, *rest)
            if number == 0 and not known:
                known.append(result)
            return result

    def plant_and_compile(*args: Any) -> None:
        if fault is not None:
            with torch.no_grad():
                fault(targets[-1])
        compile_in_place(*args)

    with (
        mock.patch.object(model_code, "ParityChecker", PlantingChecker),
        mock.patch.object(program_setup, "compile_in_place", plant_and_compile),
    ):
        try:
            yield
        finally:
            ALL_ATTENTION_FUNCTIONS.register(ATTN_IMPLEMENTATION, paged_attention)
