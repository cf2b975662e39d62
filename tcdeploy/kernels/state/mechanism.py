"""The base class of a mechanism: how a kind of module computes with state in slots, such as a recurrent layer.

A mechanism is to a recurrent module what the function in kernels/attention/interface.py is to attention. It recognises
modules of transformers, describes what they keep, and computes them in a step, by calling the module's own projections
and an op that reads and writes the state. Modelling code is neither patched nor copied.

What a mechanism's op has to respect:

- The tokens of a step are packed. In prefill, sequence i has the tokens from cu_seqlens_q[i] to cu_seqlens_q[i + 1],
  and its state is in slots[i]. In decode, row i has token i. If both are set, the first cu_seqlens_q[1] tokens are
  those of the first decode rows, and are computed as in decode. No other row has a token in this step: its slot must
  stay as it is, whatever its seq_lens. cu_seqlens_q[1] may be 0 while rows are in use.
- A chunk or row that starts at position 0 (its seq_lens equals its number of tokens) starts from the initial value,
  whatever the slot contains, NaN included. Slots are never cleared.
- A sequence or row of length 0 is padding, whatever its slot. It may write to slot 0 only, and tokens behind the last
  sequence to none. Several sequences of a check may have slot 0: they are complete prompts.
- Nothing may copy to the host or depend on the number of sequences in use: steps are captured as CUDA graphs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tcdeploy.kernels.attention.metadata import AttentionMetadata, PrefillMetadata
from tcdeploy.kernels.attention.ops import HOST_SCALARS
from tcdeploy.planning.architecture import StateTensor
from tcdeploy.torch_compat.dynamo.mark_dynamic import tensors_in


class Mechanism(ABC):
    """Stateless; one instance serves all modules of its kind."""

    name: ClassVar[str]  # in SlotState
    layer_types: ClassVar[frozenset[str]] = frozenset()  # entries of `layer_types` in configs that it serves

    @abstractmethod
    def claims(self, module: nn.Module) -> bool:
        """Whether the mechanism computes this module, which is inside of one decoder layer."""

    @abstractmethod
    def state(self, module: nn.Module) -> tuple[StateTensor, ...]:
        """What the module keeps for one sequence."""

    @abstractmethod
    def forward(
        self, module: nn.Module, state: tuple[Tensor, ...], metadata: AttentionMetadata, *args: Any, **kwargs: Any
    ) -> Any:
        """What the module's forward returns, for packed tokens. Traced by torch.compile.

        `state`: each tensor [slots, *shape], updated in place. Other arguments: those of the module's forward.
        """

    def trace(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """`forward` of one new sequence with tensors of its own, for the probe. The first tensor: [1, tokens, ...]."""
        hidden = next(tensors_in((args, kwargs)))
        tokens, device = hidden.shape[1], hidden.device
        described = ((tensor.shape, tensor.dtype) for tensor in self.state(module))
        state = tuple(
            torch.zeros(2, *shape, dtype=getattr(torch, dtype) if dtype else hidden.dtype, device=device)
            for shape, dtype in described
        )
        prefill = PrefillMetadata(
            slot_mapping=torch.zeros(tokens, dtype=torch.int64, device=device),
            block_table=torch.zeros(1, 2, dtype=torch.int32, device=device),
            seq_lens=torch.full((1,), tokens, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.tensor([0, tokens], dtype=torch.int32, device=device),
            host_scalars=torch.zeros(len(HOST_SCALARS), dtype=torch.int64),
            slots=torch.ones(1, dtype=torch.int32, device=device),
        )
        return self.forward(module, state, AttentionMetadata(prefill), *args, **kwargs)
