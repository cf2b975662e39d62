"""Roles of inputs: found for a region's call and for a package, and read by passes, dynamic sizes and cache keys.

Each input here has a number of dimensions that says nothing, or something wrong, about its role.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch._inductor.utils
from torch import Tensor, nn
from torch.fx import Graph

from tcdeploy.kernels.attention.interface import LayerBinding
from tcdeploy.kernels.attention.metadata import (
    AttentionConfig,
    AttentionMetadata,
    DecodeMetadata,
    PrefillMetadata,
    Step,
    StepHolder,
)
from tcdeploy.planning.plan import Bucket
from tcdeploy.planning.variants import DEFAULT
from tcdeploy.programs import aot, export
from tcdeploy.programs.jit import compile_with_roles
from tcdeploy.programs.passes.post_grad import PostGradPass
from tcdeploy.programs.programs import (
    Program,
    ProgramKey,
    ProgramTable,
    RegionCall,
    compile_in_place,
    run_region,
    running,
)
from tcdeploy.programs.regions import Region
from tcdeploy.programs.roles import ROLE, Role, compiled_roles_key, compiling, role_of_name, roles_of
from tcdeploy.torch_compat.dynamo.mark_dynamic import dynamic_dims
from tcdeploy.torch_compat.inductor.aot_package import start_package
from tcdeploy.torch_compat.inductor.custom_graph_pass import OPTION, pass_options
from tests.conftest import reset_programs

WIDTH, TOKENS = 1024, 6  # a product with a matrix of this width has a GEMV
WEIGHT, STATE, ROWS, STEP, VALUE = Role.WEIGHT, Role.STATE, Role.ROWS, Role.STEP, Role.VALUE
LINEAR = torch.ops.tcdeploy.linear.default


class Layer(nn.Module):
    """A weight, a buffer and a state of equal shapes. `multiply` chooses which of them a row is multiplied by."""

    def __init__(self, multiply: Callable[[Layer, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        matrices = [torch.randn(WIDTH, WIDTH).bfloat16() / 32 for _ in range(4)]
        self.weight = nn.Parameter(matrices[0], requires_grad=False)
        self.register_buffer("table", matrices[1])
        self.tcdeploy = LayerBinding((matrices[2], matrices[3]), StepHolder())
        self.multiply = multiply

    def forward(self, x: Tensor) -> Tensor:
        assert self.multiply is not None
        return self.multiply(self, x)


def by_weight(layer: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, layer.weight)


def by_buffer(layer: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, layer.table)


def by_state(layer: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, layer.tcdeploy.state[0])


def by_updated_buffer(layer: Any, x: Tensor) -> Tensor:
    out = nn.functional.linear(x, layer.table)
    layer.table.mul_(0.5)
    return out


def by_weight_in_a_branch(layer: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: by_weight(layer, x), lambda x: x + 1, (x,))


def make_step() -> Step:
    """A step of a dynamic bucket."""
    slots, table, lengths, offsets, scalars = (torch.zeros(shape) for shape in ((TOKENS,), (2, 3), (2,), (3,), (7,)))
    metadata = AttentionMetadata(PrefillMetadata(slots, table, lengths, offsets, scalars))
    return Step(Bucket("prefill", 8, 2), DEFAULT, metadata, AttentionConfig("reference", "reference", 1))


class RecordingPass(PostGradPass):
    """Records the roles of the inputs, and the number of `tcdeploy::linear` in all graphs.

    They are attributes of the class, because AOTInductor copies its options.
    """

    roles: ClassVar[list[Role | None]]
    products: ClassVar[int] = 0

    def __call__(self, graph: Graph) -> None:
        super().__call__(graph)
        RecordingPass.products += len(graph.find_nodes(op="call_function", target=LINEAR))
        RecordingPass.roles = [node.meta.get(ROLE) for node in graph.find_nodes(op="placeholder")]


def compile_layer(layer: Layer, *args: Tensor) -> None:
    """Compile and run the layer as a region of a step, and compare with its own code."""
    reset_programs()
    RecordingPass.products = 0
    options = pass_options(RecordingPass(skinny_gemm=True))
    program = torch.compile(run_region, fullgraph=True, dynamic=False, backend=compile_with_roles, options=options)
    table = layer.get_buffer("table").clone()
    with torch.no_grad(), torch._inductor.utils.fresh_cache():
        with running(RegionCall(layer, make_step(), None, args, {})):
            out = program(layer, None, *args)
        layer.get_buffer("table").copy_(table)
        torch.testing.assert_close(out, layer(*args), rtol=2e-2, atol=2e-2)


def one_row() -> Tensor:
    torch.manual_seed(6)
    return torch.randn(1, WIDTH).bfloat16()


@pytest.mark.parametrize(
    ("multiply", "products"),
    [(by_weight, 1), (by_buffer, 1), (by_state, 0), (by_updated_buffer, 0), (by_weight_in_a_branch, 0)],
)
def test_only_a_weight_is_read_before_the_previous_kernel_ends(
    multiply: Callable[[Layer, Tensor], Tensor], products: int
) -> None:
    """All are matrices. The GEMV reads its matrix early (PDL), and a kernel of the step may write the state."""
    compile_layer(Layer(multiply), one_row())
    assert RecordingPass.products == products


def test_an_argument_that_is_a_matrix_is_not_a_weight() -> None:
    class TwoArguments(Layer):
        def forward(self, x: Tensor, matrix: Tensor) -> Tensor:  # type: ignore[override]
            return nn.functional.linear(x, matrix) + self.weight[:1]

    compile_layer(TwoArguments(), one_row(), torch.randn(WIDTH, WIDTH).bfloat16() / 32)
    assert RecordingPass.products == 0
    assert (RecordingPass.roles.count(VALUE), RecordingPass.roles.count(WEIGHT)) == (2, 1)


def test_a_call_describes_all_inputs() -> None:
    layer, step, rows = Layer(), make_step(), torch.tensor([1, 3])
    hidden, other = torch.randn(1, TOKENS, 4), torch.randn(1, TOKENS + 1)
    call = RegionCall(layer, step, rows, (hidden,), {"other": other})
    prefill = step.attention_metadata.prefill
    assert prefill is not None
    inputs = [layer.weight, layer.table, *layer.tcdeploy.state, rows, prefill.slot_mapping]
    expected = [WEIGHT, WEIGHT, STATE, STATE, ROWS, Role.TOKENS]
    assert call.roles([*inputs, prefill.block_table, hidden, other, 7]) == [*expected, STEP, Role.TOKENS, VALUE, VALUE]


def test_in_a_decode_step_there_is_a_token_for_each_row() -> None:
    lengths = torch.ones(TOKENS, dtype=torch.int32)
    decode = DecodeMetadata(torch.zeros(TOKENS, 2, dtype=torch.int32), lengths, lengths)
    step = dataclasses.replace(make_step(), attention_metadata=AttentionMetadata(None, decode))
    hidden = torch.randn(1, TOKENS, 4)
    call = RegionCall(Layer(), step, None, (hidden,), {})
    assert call.roles([hidden, decode.block_table, lengths]) == [Role.TOKENS, STEP, STEP]


def test_only_a_dimension_of_tokens_is_dynamic() -> None:
    """A tensor [1, n] of another size is not per token, and its program is for that size."""

    class Loader:
        def load(self, key: ProgramKey) -> Program:
            return lambda module, rows, *args, **kwargs: args[0]

    layer, step_holder = Layer(), StepHolder()
    compile_in_place([Region("layer/0", layer)], ProgramTable(Loader()), step_holder)
    hidden, cos, other = torch.randn(1, TOKENS, 4), torch.randn(1, TOKENS, 2), torch.randn(1, TOKENS + 3)
    step_holder.step = step = make_step()
    layer(hidden, (cos, cos), bias=other)
    prefill = step.attention_metadata.prefill
    assert prefill is not None
    assert [dynamic_dims(tensor) for tensor in (hidden, cos, prefill.slot_mapping)] == [{1: 8}, {1: 8}, {0: 8}]
    assert dynamic_dims(other) == dynamic_dims(prefill.block_table) == {}


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("weight/model.layers.0.step/rows", WEIGHT), ("state/3/k", STATE), ("value/0", VALUE), ("step/rows", ROWS),
        ("step/input_ids", Role.TOKENS), ("step/prefill.slot_mapping", Role.TOKENS), ("step/decode.block_table", STEP),
    ],
)  # fmt: skip
def test_the_name_of_an_input_of_a_package_says_its_role(name: str, role: Role) -> None:
    assert role_of_name(name) is role


def test_a_package_is_compiled_with_the_roles_of_its_inputs(tmp_path: Path) -> None:
    """Two programs with equal graphs: the matrix is a weight, and the output of an earlier program."""
    row, matrix = one_row(), torch.randn(WIDTH, WIDTH).bfloat16()
    recorded = []
    for name in ("weight/up", "value/1"):
        inputs = [export._Input("value/0", row), export._Input(name, matrix)]
        exported = export._export(lambda values: nn.functional.linear(*values), inputs)
        RecordingPass.products = 0
        with aot._compiling(exported):
            options = {OPTION: RecordingPass(skinny_gemm=True)}
            start_package(exported, str(tmp_path / "program.pt2"), options).result()
        recorded.append((RecordingPass.roles, RecordingPass.products))
    assert recorded == [([VALUE, WEIGHT], 1), ([VALUE, VALUE], 0)]


def test_roles_are_part_of_the_key_of_a_program() -> None:
    """Otherwise a program that reads a weight early would be loaded for an equal graph whose input is a state."""
    graph_pass, inputs = PostGradPass(), [torch.zeros(2, 2)]
    uuids = {graph_pass.uuid()}
    for role in (WEIGHT, STATE):
        with compiling([role], inputs):
            uuids.add(graph_pass.uuid())
    assert len(uuids) == 2, "state has no role that a pass reads"
    assert compiled_roles_key() == ""


def test_inputs_other_than_described_have_no_role(caplog: pytest.LogCaptureFixture) -> None:
    """AOTAutograd may merge inputs that alias, or add some. A wrong role would be worse than none."""
    matrix, row = torch.zeros(4, 4), torch.zeros(1, 4)
    with caplog.at_level(logging.INFO), compiling([WEIGHT, VALUE, VALUE], [matrix, row, 3]):
        assert roles_of([torch.ones(4, 4), torch.ones(1, 4), 5]) == [WEIGHT, VALUE, VALUE]
        others = [[matrix, row], [row, matrix, 3], [matrix.double(), row, 3], [matrix, 3, row], [matrix[0], row, 3]]
        assert not caplog.records and all(roles_of(values) == () for values in others)
    assert [record.args for record in caplog.records] == [("its graph has other inputs than its call",)] * len(others)
    assert roles_of([matrix, row, 3]) == ()
