"""Recognise exceptions that torch.compile raises.

Their classes are defined in private modules. Only the names of those modules and of one class are used, and nothing is
imported, so a class that torch moves is at worst not recognised: its traceback is then shown instead of an error with a
hint.
"""

from __future__ import annotations

from tcdeploy.torch_compat.internal import Internal, find

PRIVATE_MODULES = ("torch._dynamo", "torch._inductor", "torch._functorch")
UNSUPPORTED = "Unsupported"  # Dynamo's: a graph break under fullgraph=True


def supported() -> bool:
    base, unsupported = find("torch._dynamo.exc:TorchDynamoException"), find(f"torch._dynamo.exc:{UNSUPPORTED}")
    return all(isinstance(error, type) and issubclass(error, RuntimeError) for error in (base, unsupported))


INTERNAL = Internal(
    "compile errors",
    "torch",
    "torch._dynamo.exc.TorchDynamoException",
    "errors of torch.compile may be shown as tracebacks without a hint",
    supported,
)


def is_compile_error(error: BaseException) -> bool:
    """Whether Dynamo, AOTAutograd or Inductor raised it."""
    return any(cls.__module__.startswith(PRIVATE_MODULES) for cls in type(error).__mro__)


def is_graph_break(error: BaseException) -> bool:
    """Whether it reports code that Dynamo cannot trace."""
    return is_compile_error(error) and any(cls.__name__ == UNSUPPORTED for cls in type(error).__mro__)
