"""CUDA tensors without data: FakeTensors on a GPU that does not exist. CPU tensors stay real.

Buffers of the engine are filled through numpy on the host, so a mode in which all tensors are fake does not work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves

without_fake_mode = unset_fake_temporarily  # for exported programs, which have a mode of their own


class _FakeCudaMode(FakeTensorMode):
    implementations: Mapping[str, Callable[..., Any]] = {}  # of ops of `namespace` that run on fake tensors
    namespace = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.implementations and func.namespace == self.namespace:
            with self:
                return self.implementations[func._schema.name.split("::")[1]](*args, **kwargs)
        device = kwargs.get("device")
        is_on_gpu = device is not None and torch.device(device).type == "cuda"
        if is_on_gpu or any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            return super().__torch_dispatch__(func, types, args, kwargs)
        return func(*args, **{**kwargs, "pin_memory": False} if kwargs.get("pin_memory") else kwargs)


class FakeCuda:
    """Blocks in which new CUDA tensors have no data: `tensors()`.

    All blocks share one FakeTensorMode, because an op does not accept fake tensors of two modes.
    """

    def __init__(self, namespace: str, implementations: Mapping[str, Callable[..., Any]]) -> None:
        """`implementations`: the Python functions of the ops of this namespace, by name."""
        self._implementations = implementations
        self._mode = _FakeCudaMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        self._mode.namespace = namespace

    @contextlib.contextmanager
    def tensors(self, runs_ops: bool = False) -> Iterator[None]:
        """`runs_ops`: call the Python functions of ops, whose launches compile kernels, instead of their fakes."""
        before = self._mode.implementations
        self._mode.implementations = self._implementations if runs_ops else {}
        try:
            with self._mode:
                yield
        finally:
            self._mode.implementations = before
