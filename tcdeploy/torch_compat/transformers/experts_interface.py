"""The internals of transformers' interface for experts: what its decorator adds to a class.

Functions of experts are registered and chosen with public names (`ALL_EXPERTS_FUNCTIONS`,
`set_experts_implementation`). The decorator, `use_experts_implementation`, adds attributes that describe the weights,
and the private method `_apply_gate`. A class may define its own: that of gpt-oss clamps, and reads alternating rows.
"""

from __future__ import annotations

from typing import Any

from tcdeploy.torch_compat.internal import find, internal, mentions

DECORATOR = "transformers.integrations.moe:use_experts_implementation"


@internal(
    "kernels of experts", "transformers.integrations.moe.use_experts_implementation",
    "mixtures of experts run transformers' own function, and quantised experts are dequantised",
)  # fmt: skip
def supported() -> bool:
    return mentions(find(DECORATOR), "_apply_gate", "has_gate", "has_bias", "is_transposed")


def supports_experts_interface(module: Any) -> bool:
    """Whether a module's forward pass calls the experts function that was chosen for its model."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed") and supported()


def is_experts_class(module_class: type[Any]) -> bool:
    """Whether modules of the class may support the interface. The other attributes are set after their parameters."""
    return hasattr(module_class, "_apply_gate") and supported()


def apply_gate(module: Any, gate_up: Any) -> Any:
    """The inputs [pairs, intermediate] of the down projection, from the outputs of gate and up in one tensor."""
    return module._apply_gate(gate_up)


def is_expert_parallel(module: Any) -> bool:
    """Whether the module has only some of the model's experts. transformers 5.17 has no such attribute."""
    return getattr(module, "_is_expert_parallel", False)
