"""Exports a step as programs: before the layers, one per kind of layer, between layers if needed, and after them.

torch.export traces the model's own forward with an opaque operator in place of each decoder layer. What remains is what
the family does around its layers: embedding, rotary factors, final norm, LM head, soft-capping. The graph is cut at the
layers (graph_parts.py), and each part becomes a program. A layer is exported with its weights, its state and the
attention metadata as inputs. Layers whose graphs are equal, Python numbers included, share one program.

The trace runs the family's Python code on the inputs of a real step. A program is specialised on the shapes of that
step, except for sizes marked as dynamic (torch_compat/dynamo/mark_dynamic.py).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node

from tcdeploy.kernels.attention.metadata import AttentionMetadata, DecodeMetadata, PrefillMetadata
from tcdeploy.planning.dtypes import dtype_name
from tcdeploy.programs.graph_parts import GraphPart, cut_at_layers, layer_operator
from tcdeploy.programs.model_forward import StepInputs, step_tensors
from tcdeploy.programs.passes.foreign_ops import foreign_ops, graph_modules, op_name
from tcdeploy.programs.roles import ROLE, Role, role_of_name
from tcdeploy.programs.step_program import InputSpec, ProgramCall, StepProgram
from tcdeploy.programs.traced_layers import TracedLayer, bound_state, find_outputs, replace_layers
from tcdeploy.torch_compat.dynamo.mark_dynamic import dynamic_dims, tensors_in
from tcdeploy.torch_compat.dynamo.operation_trace import trace_operations

METADATA_CHECK = "aten::_assert_tensor_metadata"
MIN_DYNAMIC_SIZE = 2  # torch specialises programs on sizes of 0 and 1
MAX_DYNAMIC_SIZE = 1 << 31  # a program must allow at least this size; torch's own limit is larger


class ExportedStep(NamedTuple):
    step_program: StepProgram
    exported: dict[str, ExportedProgram]  # by program name
    equal_layers: tuple[int, ...]  # for each layer, the first layer that has the same program


class _LayerCall(NamedTuple):
    """The arguments of a layer's call. The tensors among them are `hidden, *inputs` of the operator."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def with_tensors(self, tensors: Iterable[object]) -> _LayerCall:
        """A copy of the call with its tensors replaced by `tensors`, in order."""
        return _LayerCall(*_replace_tensors((self.args, self.kwargs), iter(tensors)))


class _Input(NamedTuple):
    """An input of a program: its name in the step program, an example, and its dynamic dimensions with their maxima."""

    name: str
    example: Tensor
    dynamic_dims: Mapping[int, int | None] = MappingProxyType({})

    @property
    def role(self) -> Role:
        return role_of_name(self.name)

    @property
    def spec(self) -> InputSpec:
        shape = tuple(None if dim in self.dynamic_dims else size for dim, size in enumerate(self.example.shape))
        strides = None if self.example.is_contiguous() else self.example.stride()
        if strides is not None and self.dynamic_dims:
            raise NotImplementedError(f"{self.name} has dynamic sizes and is not contiguous")
        return InputSpec(dtype_name(self.example.dtype), shape, strides)

    @property
    def dynamic_shape(self) -> dict[int, Any] | None:
        return {dim: Dim.DYNAMIC(MIN_DYNAMIC_SIZE, maximum) for dim, maximum in self.dynamic_dims.items()} or None


@torch.no_grad()
def export_step(
    model: nn.Module, layers: Sequence[TracedLayer], inputs: StepInputs, compile_options: str,
    equal_layers: Sequence[int] | None = None,
) -> ExportedStep:  # fmt: skip
    """Trace a step. `compile_options` describes how the programs will be compiled; it enters the hash in their names.

    `equal_layers`: those of an earlier exported step. None: layers are compared by the operations that they run, so
    that each program of layers is exported once.

    Raises the errors of torch.export, and NotImplementedError for what a step program cannot hold.
    """
    return _StepExport(model, layers, inputs, compile_options, equal_layers).run()


class _StepExport:
    def __init__(
        self, model: nn.Module, layers: Sequence[TracedLayer], inputs: StepInputs, compile_options: str,
        equal_layers: Sequence[int] | None,
    ) -> None:  # fmt: skip
        self._model, self._layers, self._inputs = model, layers, inputs
        self._compile_options, self._equal_layers = compile_options, equal_layers
        self._kinds = [layer.kind for layer in layers]
        self._outputs = find_outputs(model, layers, inputs)
        self._calls: list[ProgramCall] = []
        self._exported: dict[str, ExportedProgram] = {}
        self._specs: dict[str, tuple[InputSpec, ...]] = {}
        self._values: dict[Node, _Input] = {}  # inputs and outputs of programs, by node of the traced graph
        self._programs_of_layers: dict[str, str] = {}  # by what distinguishes calls of equal layers
        self._layer_programs: list[str] = []  # by layer
        self._value_numbers = itertools.count()

    def run(self) -> ExportedStep:
        traced, layer_calls = self._trace_around_layers()
        for number, part in enumerate(cut_at_layers(traced.graph, len(self._layers))):
            if part.nodes:
                self._add_part(part)
            if part.layer_call is not None:
                self._add_layer(number, part.layer_call, layer_calls[number])
        [logits] = next(node for node in traced.graph.nodes if node.op == "output").args[0]
        ops = set[str]().union(*map(foreign_ops, self._exported.values()))
        step_program = StepProgram(tuple(self._calls), self._values[logits].name, self._specs, tuple(sorted(ops)))
        programs = self._layer_programs
        return ExportedStep(step_program, self._exported, tuple(programs.index(name) for name in programs))

    def _trace_around_layers(self) -> tuple[GraphModule, dict[int, _LayerCall]]:
        """The graph of the model's forward with an operator in place of each layer, and the layers' arguments."""
        prefixes = tuple(f"{layer.path}." for layer in self._layers)
        tensors = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        weights = [_Input(f"weight/{name}", item) for name, item in tensors.items() if not name.startswith(prefixes)]
        names = [item.name.removeprefix("weight/") for item in weights]
        given = step_tensors(self._inputs)
        step = [_step_input(name, given[name]) for name in ("input_ids", "position_ids", "rows") if name in given]
        calls: dict[int, _LayerCall] = {}
        last_rows: list[Tensor] = []

        def call_operator(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            calls[index] = _LayerCall(args, kwargs)
            hidden, *others = tensors_in((args, kwargs))
            rows = last_rows[0] if last_rows and index == len(self._layers) - 1 else None
            length, dtype = self._outputs[index]
            output = layer_operator(hidden, others, rows, index, dtype)
            return (output, *[None] * (length - 1)) if length else output

        def forward(values: list[Tensor]) -> Any:
            input_ids, position_ids, *rows = values[len(names) :]
            last_rows[:] = rows if self._inputs.selects_in_last_layer else []
            kwargs: dict[str, Any] = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
            if rows and not self._inputs.selects_in_last_layer:
                kwargs["logits_to_keep"] = rows[0]
            with replace_layers(self._layers, call_operator):
                weights = dict(zip(names, values, strict=False))
                return torch.func.functional_call(self._model, weights, (), kwargs).logits

        exported = _export(forward, [*weights, *step])
        placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
        self._values = dict(zip(placeholders, [*weights, *step], strict=True))
        return exported.graph_module, calls

    def _add_part(self, part: GraphPart) -> None:
        """Export a part of the graph around the layers, and add its call."""
        inputs = [self._values[node] for node in part.inputs()]
        module = part.as_module()
        name = self._add_program(lambda values: module(*values), inputs)
        self._add_call(name, inputs, part.outputs)

    def _add_layer(self, number: int, node: Node, call: _LayerCall) -> None:
        """Export a layer and add its call. An equal layer that was called with equal arguments has the same program."""
        layer = self._layers[number]
        hidden, others, rows, *_ = node.args
        arguments = [self._values[argument] for argument in (hidden, *others)]  # type: ignore[misc,index]
        tensors = {**dict(layer.module.named_parameters()), **dict(layer.module.named_buffers())}
        weights = [_Input(f"weight/{layer.path}.{name}", tensor) for name, tensor in tensors.items()]
        state = [_Input(name, tensor, dynamic_dims(tensor)) for name, tensor in layer.named_state.items()]
        metadata = [_step_input(name, tensor) for name, tensor in step_tensors(self._inputs).items() if "." in name]
        selected = [] if rows is None else [self._values[rows]]  # type: ignore[index]
        inputs = [*weights, *arguments, *state, *metadata, *selected]
        call_without_tensors = call.with_tensors(itertools.repeat("tensor"))
        specs = [item.spec for item in inputs]
        counts = [len(tensors), len(arguments), len(state), len(metadata)]
        names = [item.name.removeprefix("step/") for item in metadata]

        def forward(values: list[Tensor]) -> Tensor:
            remaining = iter(values)
            weights, arguments, state, metadata = ([next(remaining) for _ in range(count)] for count in counts)
            attention = _make_metadata(dict(zip(names, metadata, strict=True)))
            step = dataclasses.replace(self._inputs.step, attention_metadata=attention)
            named_weights = dict(zip(tensors, weights, strict=True))
            with bound_state(layer.bindings, state, step):
                output = torch.func.functional_call(layer.module, named_weights, *call.with_tensors(arguments))
            if isinstance(output, tuple | list) and all(item is None for item in output[1:]):
                output = output[0]
            if not isinstance(output, Tensor):
                raise NotImplementedError(f"{layer.path} returns a {type(output).__name__}, not a tensor")
            return (output[:, values[-1]] if selected else output).contiguous()

        if self._equal_layers is not None:
            kind: object = self._equal_layers[number]
        else:
            operations = trace_operations(forward, [item.example for item in inputs])
            # A condition on a dynamic size may hold for the example's size only, so the kinds are compared too.
            kind = number if operations is None else (operations, self._kinds.index(layer.kind))
        signature = repr((kind, list(tensors), call_without_tensors, specs))
        if signature not in self._programs_of_layers:
            name = self._programs_of_layers[signature] = self._add_program(forward, inputs)
            _check_output(self._exported[name], node.meta["val"], layer.path)
        self._layer_programs.append(self._programs_of_layers[signature])
        self._add_call(self._programs_of_layers[signature], inputs, [node])

    def _add_program(self, forward: Callable[[list[Tensor]], Any], inputs: list[_Input]) -> str:
        """Export a program; returns its name, which is equal for equal programs."""
        exported = _export(forward, inputs)
        specs = tuple(item.spec for item in inputs)
        # The maxima decide whether kernels compute indices in 32 bits.
        maxima = [list(item.dynamic_dims.values()) for item in inputs]
        roles = [item.role.value for item in inputs]
        identity = f"{_code(exported)}{specs}{maxima}{roles}{self._compile_options}"
        name = hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._exported.setdefault(name, exported)
        self._specs[name] = specs
        return name

    def _add_call(self, program: str, inputs: list[_Input], outputs: list[Node]) -> None:
        for node in outputs:
            self._values[node] = _example_value(node, f"value/{next(self._value_numbers)}")
        output_names = tuple(self._values[node].name for node in outputs)
        self._calls.append(ProgramCall(program, tuple(item.name for item in inputs), output_names))


class _Function(nn.Module):
    """A function of a list of tensors as a module, which torch.export requires."""

    def __init__(self, function: Callable[[list[Tensor]], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: list[Tensor]) -> Any:
        return self.function(values)


def _export(function: Callable[[list[Tensor]], Any], inputs: list[_Input]) -> ExportedProgram:
    """Raises NotImplementedError for constant tensors, which names do not hash, and for limits of dynamic sizes."""
    # detach() makes new tensor objects: torch.export removes the dynamic marks from the objects that it receives.
    examples = [item.example.detach() for item in inputs]
    shapes = ([item.dynamic_shape for item in inputs],)
    exported = torch.export.export(_Function(function), (examples,), dynamic_shapes=shapes, strict=False)
    if exported.constants:
        raise NotImplementedError(f"its forward creates constant tensors ({', '.join(exported.constants)})")
    for node, item in zip(exported.graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta[ROLE] = item.role
    maxima = _required_maxima(exported, inputs)
    for symbol, sizes in exported.range_constraints.items():
        if sizes.lower > MIN_DYNAMIC_SIZE or sizes.upper < maxima.get(str(symbol), MAX_DYNAMIC_SIZE):
            raise NotImplementedError(f"its forward allows only sizes from {sizes.lower} to {sizes.upper}")
    _erase_metadata_checks(exported)
    return exported


def _required_maxima(exported: ExportedProgram, inputs: list[_Input]) -> dict[str, int]:
    """The size that each symbol of the program must allow: the smallest maximum of the inputs that have this size."""
    maxima: dict[str, int] = {}
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"]
    for node, item in zip(placeholders, inputs, strict=True):
        for dim, maximum in item.dynamic_dims.items():
            symbol = str(node.meta["val"].shape[dim])
            maxima[symbol] = min(maxima.get(symbol, MAX_DYNAMIC_SIZE), maximum or MAX_DYNAMIC_SIZE)
    return maxima


def _erase_metadata_checks(exported: ExportedProgram) -> None:
    """Erase the checks of dtype and device that torch.export adds at each cast, because they prevent fusions.

    `LoadedStep` checks the inputs of a program, and the dtypes of the other tensors follow from theirs.
    """
    for module in graph_modules(exported):
        for node in [node for node in module.graph.nodes if op_name(node) == METADATA_CHECK]:
            module.graph.erase_node(node)
        module.recompile()


def _code(exported: ExportedProgram) -> str:
    """The code of the graph and of its subgraphs."""
    modules = exported.graph_module.named_modules()
    return "".join(f"{name}: {module.code}" for name, module in modules if isinstance(module, GraphModule))


def _check_output(exported: ExportedProgram, expected: Tensor, path: str) -> None:
    """Raise NotImplementedError unless a layer's output has the dtype and shape that the operator gives it."""

    def describe(value: Tensor) -> tuple[torch.dtype, list[int | None]]:
        return value.dtype, [size if isinstance(size, int) else None for size in value.shape]

    node = next(node for node in exported.graph.nodes if node.op == "output").args[0][-1]
    if describe(node.meta["val"]) != describe(expected):
        raise NotImplementedError(f"{path} does not return a tensor like its first argument")


def _replace_tensors(value: Any, replacements: Iterator[object]) -> Any:
    """A copy of nested tuples, lists and dictionaries with the tensors replaced, in the order of `tensors_in`."""
    if isinstance(value, Tensor):
        return next(replacements)
    if isinstance(value, dict):
        return {name: _replace_tensors(item, replacements) for name, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_replace_tensors(item, replacements) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _step_input(name: str, tensor: Tensor) -> _Input:
    return _Input(f"step/{name}", tensor, dynamic_dims(tensor))


def _make_metadata(tensors: dict[str, Tensor]) -> AttentionMetadata:
    """The inverse of `step_tensors` for attention metadata."""

    def of_phase(phase: str) -> dict[str, Tensor]:
        names = [name for name in tensors if name.startswith(f"{phase}.")]
        return {name.removeprefix(f"{phase}."): tensors[name] for name in names}

    prefill, decode = of_phase("prefill"), of_phase("decode")
    return AttentionMetadata(
        PrefillMetadata(**prefill) if prefill else None, DecodeMetadata(**decode) if decode else None
    )


def _example_value(node: Node, name: str) -> _Input:
    """A value of the graph around the layers, with zeros as its example."""
    value = node.meta["val"]
    dims = {dim: None for dim, size in enumerate(value.shape) if not isinstance(size, int)}
    sizes = [size if isinstance(size, int) else size.node.hint for size in value.shape]
    return _Input(name, torch.zeros(sizes, dtype=value.dtype, device=value.device), dims)
