"""A step that is exported as programs computes what the model's own forward computes, for many families."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from tcdeploy.engine.schedule.sequence import Chunk, SamplingParams, Sequence
from tcdeploy.engine.schedule.step_batch import StepBatch, prefilled_rows, prompt_batch, prompt_chunk
from tcdeploy.engine.warm.program_setup import traced_layers
from tcdeploy.errors import MismatchError
from tcdeploy.kernels.attention.metadata import do_nothing
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.programs import aot, export
from tcdeploy.programs.graph_parts import cut_at_layers, layer_operator
from tcdeploy.programs.model_forward import StepInputs, step_tensors
from tcdeploy.programs.passes.foreign_ops import op_name
from tcdeploy.programs.step_program import InputSpec, LoadedStep, ProgramCall, StepProgram, parse_step_program
from tcdeploy.programs.traced_layers import TracedLayer
from tcdeploy.start import model_code
from tcdeploy.start.decide import decide
from tcdeploy.start.model_code import load_runner
from tcdeploy.torch_compat.dynamo.compiled_call import get_compiled_call
from tests.model_families import LAYER_KINDS, SUPPORTED, save_config

BUCKET = 64


class ExportingForward:
    """Runs each step twice: by the model's forward, and by exported programs, which torch.export runs uncompiled."""

    def __init__(self, runner: Any, layers: list[TracedLayer], selects_in_last_layer: bool = False) -> None:
        self.runner, self.layers, self.selects_in_last_layer = runner, layers, selects_in_last_layer
        self.loaded: list[LoadedStep] = []
        self.num_reused = 0  # runs of a step's programs for a later step
        self.equal_layers: tuple[int, ...] | None = None
        self.steps: list[tuple[StepInputs, StepProgram, Tensor, Tensor]] = []
        self.ops: set[str] = set()  # names, of all programs
        self.states_before = [[binding.state for binding in layer.bindings] for layer in layers]

    def __call__(self, inputs: StepInputs) -> Tensor:
        expected = self.runner.transformers_forward(inputs)
        inputs = inputs._replace(selects_in_last_layer=self.selects_in_last_layer and inputs.rows is not None)
        aot._mark_dynamic_sizes(inputs.step.bucket, inputs)
        exported = export.export_step(self.runner.model, self.layers, inputs, "", self.equal_layers)
        self.equal_layers = exported.equal_layers
        step_program = parse_step_program(exported.step_program.to_json())
        assert step_program == exported.step_program
        programs = {name: self.uncompiled(program) for name, program in exported.exported.items()}
        loaded = LoadedStep(step_program, programs, aot._constants(self.runner.model, self.layers))
        tensors = {f"step/{name}": tensor for name, tensor in step_tensors(inputs).items()}
        for earlier in self.loaded:
            if earlier._step_program.programs == step_program.programs:  # exported for a step of another size
                torch.testing.assert_close(earlier.run(tensors, do_nothing)[0], expected)
                self.num_reused += 1
        self.loaded.append(loaded)
        self.steps.append((inputs, step_program, expected, loaded.run(tensors, do_nothing)[0]))
        return expected

    def uncompiled(self, program: Any) -> Any:
        self.ops |= {op_name(node) for node in program.graph.nodes}
        module = program.module(check_guards=False)

        def run(tensors: list[Tensor]) -> list[Tensor]:
            output = module(tensors)
            return [output] if isinstance(output, Tensor) else list(output)

        return run


def load_model(folder: str, cache_dir: str, **flags: Any) -> tuple[Any, list[TracedLayer]]:
    """A runner of an uncompiled model, and its layers."""
    base = {"model": folder, "buckets": (BUCKET,), "batch_sizes": (2, 3), "context": 256, "cache_dir": cache_dir}
    planned = decide(build_recipe({**base, "load_format": "dummy", **flags}, environ={}))
    runner = load_runner(planned)
    return runner, traced_layers(runner.model, planned.architecture)


def run_steps(runner: Any) -> None:
    """Prefill two prompts, decode both, and decode them beside a chunk of a third prompt."""
    prompts = [[(7 * position + row) % 250 + 3 for position in range(20 - 3 * row)] for row in range(3)]
    blocks = runner.plan.blocks_per_sequence
    sequences = [
        Sequence(
            row, prompt, len(prompt), SamplingParams(), blocks=list(range(1 + row * blocks, 1 + (row + 1) * blocks))
        )
        for row, prompt in enumerate(prompts)
    ]
    decoding = sequences[:2]
    runner.run(prompt_batch(Chunk(sequence, 0, len(sequence.token_ids)) for sequence in decoding))
    for sequence in decoding:
        sequence.token_ids.append(5)
    lengths = [len(sequence.token_ids) for sequence in decoding]
    runner.row_assignment.apply(prefilled_rows(decoding))
    runner.run(StepBatch(num_decoding=2))
    runner.row_assignment.apply(prefilled_rows(decoding))
    runner.run(StepBatch(num_decoding=2, chunks=[prompt_chunk(Chunk(sequences[2], 0, 9))], lengths=lengths))


def few_layers(family: str) -> dict[str, Any]:
    """Changes of a config: one layer more than the family has kinds, because a trace runs through each layer."""
    count = LAYER_KINDS.get(family, 1) + 1
    if family == "gpt2":
        return {"n_layer": count}
    if family == "gemma3_text":  # otherwise only each sixth layer is of the second kind
        return {"num_hidden_layers": count, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    return {"num_hidden_layers": count}


# The exported programs of all families give the tokens of transformers in start/test_packaged_families.py.
FAMILIES = ("llama", "gpt2", "gpt_oss")
WITH_EXPERTS = ("gpt_oss", "mixtral")


@pytest.mark.parametrize(
    ("family", "shapes"),
    [
        *((family, "bucket") for family in FAMILIES),
        *(pytest.param(family, "bucket", marks=pytest.mark.long) for family in SUPPORTED if family not in FAMILIES),
        ("llama", "dynamic"),
        pytest.param("gemma3_text", "dynamic", marks=pytest.mark.long),
    ],
)
def test_exported_steps_compute_the_models_logits(family: str, shapes: str, tmp_path: Path, cache_dir: str) -> None:
    folder = save_config(family, tmp_path, **few_layers(family))
    runner, layers = load_model(folder, cache_dir, shapes=shapes, mixed_steps="on")
    runner.forward = forward = ExportingForward(runner, layers)
    run_steps(runner)
    assert len(forward.steps) == 3 and len(layers) > LAYER_KINDS.get(family, 1)
    for _, step_program, expected, logits in forward.steps:
        if family in WITH_EXPERTS:
            torch.testing.assert_close(logits, expected)  # eager experts run other GEMMs
        else:
            assert torch.equal(logits, expected)
        assert len(step_program.calls) == len(layers) + 2
        assert len(step_program.programs) == LAYER_KINDS.get(family, 1) + 2, "a kind of layer has one program"


def test_ops_that_packages_would_need_a_library_for_are_named(
    tmp_path: Path, cache_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_config("mixtral", tmp_path, num_hidden_layers=1)
    for uses_our_function, expected in ((True, ()), (False, ("transformers::grouped_mm_fallback",))):
        if not uses_our_function:
            monkeypatch.setattr(model_code, "use_experts_function", lambda model: None)
        runner, layers = load_model(folder, cache_dir)
        runner.forward = forward = ExportingForward(runner, layers)
        run_steps(runner)
        assert [step_program.foreign_ops for _, step_program, *_ in forward.steps] == [expected] * 3


@pytest.mark.parametrize("shapes", ["bucket", pytest.param("dynamic", marks=pytest.mark.long)])
def test_the_last_layer_can_return_only_the_selected_rows(shapes: str, tmp_path: Path, cache_dir: str) -> None:
    folder = save_config("qwen3", tmp_path, num_hidden_layers=2)
    runner, layers = load_model(folder, cache_dir, shapes=shapes, mixed_steps="on")
    runner.forward = forward = ExportingForward(runner, layers, selects_in_last_layer=True)
    run_steps(runner)
    for inputs, step_program, expected, logits in forward.steps:
        torch.testing.assert_close(logits, expected)
        assert len(step_program.programs) == 3 + inputs.selects_in_last_layer, "the last layer has a program of its own"


def test_a_program_serves_other_row_counts_and_lengths_than_it_was_exported_for(tmp_path: Path, cache_dir: str) -> None:
    folder = save_config("llama", tmp_path, num_hidden_layers=1)
    runner, layers = load_model(folder, cache_dir, shapes="dynamic", mixed_steps="on")
    runner.forward = forward = ExportingForward(runner, layers)
    run_steps(runner)
    lengths = [inputs.input_ids.shape[1] for inputs, *_ in forward.steps if inputs.step.bucket.is_prefill]
    assert lengths == [17 + 20, 9 + 2] and forward.num_reused == 1


def test_a_number_that_depends_on_the_layer_is_kept(tmp_path: Path, cache_dir: str) -> None:
    folder = save_config("gpt2", tmp_path, scale_attn_by_inverse_layer_idx=True, n_layer=2)
    runner, layers = load_model(folder, cache_dir)
    runner.forward = forward = ExportingForward(runner, layers)
    run_steps(runner)
    for _, step_program, expected, logits in forward.steps:
        assert torch.equal(logits, expected) and len(step_program.programs) == 2 + 2


class ExportedLlama(NamedTuple):
    """A model of equal layers, after its steps were exported."""

    forward: ExportingForward
    num_exports: int
    marks: list[Any]  # the dynamic dimensions of the tensors of its state before the export


@pytest.fixture(scope="module")
def exported_llama(tmp_path_factory: pytest.TempPathFactory, cache_dir: str) -> ExportedLlama:
    runner, layers = load_model(save_config("llama", tmp_path_factory.mktemp("llama"), num_hidden_layers=3), cache_dir)
    runner.forward = forward = ExportingForward(runner, layers)
    marks = marks_of(forward)
    with mock.patch.object(export, "_export", wraps=export._export) as export_one:
        run_steps(runner)
    return ExportedLlama(forward, export_one.call_count, marks)


def marks_of(forward: ExportingForward) -> list[Any]:
    return [export.dynamic_dims(tensor) for layer in forward.layers for tensor in layer.named_state.values()]


def test_only_the_first_of_equal_layers_is_exported(exported_llama: ExportedLlama) -> None:
    forward = exported_llama.forward
    assert len(forward.layers) == 3 and forward.equal_layers == (0, 0, 0)
    exports = 4 * len(forward.steps)
    assert exported_llama.num_exports == exports, "the whole model, and the parts before, in and after the layers"


@pytest.mark.parametrize("difference", ["weight shapes", "a number"])
def test_layers_that_differ_have_programs_of_their_own(difference: str, tmp_path: Path, cache_dir: str) -> None:
    runner, layers = load_model(save_config("llama", tmp_path, num_hidden_layers=3), cache_dir)
    layer: Any = layers[1].module
    if difference == "a number":
        layer.input_layernorm.variance_epsilon = 0.5
    else:
        for name, shape in (("gate_proj", (64, 32)), ("up_proj", (64, 32)), ("down_proj", (32, 64))):
            setattr(layer.mlp, name, torch.nn.Linear(*shape))
    runner.forward = forward = ExportingForward(runner, layers)
    run_steps(runner)
    for _, step_program, expected, logits in forward.steps:
        assert torch.equal(logits, expected) and len(step_program.programs) == 4
        first, second, third = [call.program for call in step_program.calls[1:4]]
        assert first == third != second
    assert forward.equal_layers == (0, 1, 0)


def test_programs_do_not_check_dtypes(exported_llama: ExportedLlama) -> None:
    """torch.export adds such checks, and as users of a tensor they prevent fusions."""
    ops = exported_llama.forward.ops
    assert "aten::rsqrt" in ops and export.METADATA_CHECK not in ops


def test_the_export_leaves_the_model_as_it_was(exported_llama: ExportedLlama) -> None:
    forward = exported_llama.forward
    assert forward.runner.step_holder.step is None
    for layer, states in zip(forward.layers, forward.states_before, strict=True):
        assert all(binding.state is state for binding, state in zip(layer.bindings, states, strict=True))
        assert get_compiled_call(layer.module) is None
    assert marks_of(forward) == exported_llama.marks == [{0: None}] * 2 * 3


def test_nodes_between_two_layers_form_a_part() -> None:
    """A graph: scale = x.mean(); h = layer 0(x + 1, scale); h2 = layer 1(h * scale); output h2 - x."""

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            scale = x.mean()
            hidden = layer_operator(x + 1, [scale], None, 0, "")
            hidden = layer_operator(hidden * scale, [], None, 1, "")
            return hidden - x.reshape(x.shape[0], -1)

    exported = torch.export.export(Model(), (torch.ones(2, 3),), strict=False)
    parts = cut_at_layers(exported.graph, 2)
    assert [[node.target.name() for node in part.nodes] for part in parts] == [  # type: ignore[union-attr]
        ["aten::mean", "aten::add.Tensor", "aten::reshape"], ["aten::mul.Tensor"], ["aten::sub.Tensor"]
    ]  # fmt: skip
    assert [len(part.outputs) for part in parts] == [3, 1, 1]
    assert [part.layer_call is not None for part in parts] == [True, True, False]
    scaled = parts[1].as_module()(torch.full((2, 3), 4.0), torch.tensor(0.5))
    assert torch.equal(scaled[0], torch.full((2, 3), 2.0))


def test_a_layer_that_reads_a_later_one_is_not_exported() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return layer_operator(layer_operator(x, [], None, 1, ""), [], None, 0, "")

    exported = torch.export.export(Model(), (torch.ones(2, 3),), strict=False)
    with pytest.raises(NotImplementedError, match="layer 0 reads the output of a later layer"):
        cut_at_layers(exported.graph, 2)


DOUBLE = StepProgram(
    (ProgramCall("double", ("step/x",), ("value/0",)), ProgramCall("add", ("value/0", "weight/bias"), ("value/1",)),
     ProgramCall("double", ("value/1",), ("value/2",))),
    "value/2",
    {
        "double": (InputSpec("float32", (None, 2)),),
        "add": (InputSpec("float32", (None, 2)), InputSpec("float32", (2,))),
    },
)  # fmt: skip
PROGRAMS = {"double": lambda tensors: [2 * tensors[0]], "add": lambda tensors: [tensors[0] + tensors[1]]}


def test_values_are_freed_after_their_last_use() -> None:
    assert DOUBLE.last_uses() == [[], ["value/0"], ["value/1"]]
    loaded = LoadedStep(DOUBLE, PROGRAMS, {"weight/bias": torch.tensor([1.0, 2.0]), "weight/other": torch.ones(9)})
    assert loaded.run({"step/x": torch.ones(1, 2)}, do_nothing).tolist() == [[6.0, 8.0]]
    assert loaded.run({"step/x": torch.zeros(2, 2)}, do_nothing).tolist() == [[2.0, 4.0]] * 2


def test_a_step_can_be_abandoned_before_each_program() -> None:
    """An idle capture gives way to a request."""
    loaded = LoadedStep(DOUBLE, PROGRAMS, {"weight/bias": torch.ones(2)})
    for number in range(3):
        answers = iter([*[None] * number, RuntimeError("abandoned")])

        def before_program(answers: Iterator[RuntimeError | None] = answers) -> None:
            if error := next(answers):
                raise error

        with pytest.raises(RuntimeError, match="abandoned"):
            loaded.run({"step/x": torch.ones(1, 2)}, before_program)
        assert next(answers, "none left") == "none left", "it was asked before each program until then"
    assert loaded.run({"step/x": torch.ones(1, 2)}, do_nothing).tolist() == [[6.0, 6.0]]


@pytest.mark.parametrize(
    ("bias", "x", "message"),
    [
        (
            torch.ones(3),
            torch.ones(1, 2),
            r"weight/bias, is contiguous float32 \[3\] instead of contiguous float32 \[2\]",
        ),
        (torch.ones(2, dtype=torch.float64), torch.ones(1, 2), "weight/bias, is contiguous float64"),
        (torch.ones(2), torch.ones(2), r"float32 \[2\] instead of contiguous float32 \[any, 2\]"),
        (torch.ones(2), torch.ones(1, 3), r"float32 \[1, 3\] instead of contiguous float32 \[any, 2\]"),
        (torch.ones(2), torch.ones(2, 3).T[1:], r"step/x, is strided .* float32 \[2, 2\]"),
        (None, torch.ones(1, 2), "the model has no weight/bias"),
    ],
)
def test_an_input_that_does_not_fit_its_program_is_refused(bias: Tensor | None, x: Tensor, message: str) -> None:
    constants = {} if bias is None else {"weight/bias": bias}
    with pytest.raises(MismatchError, match=message):
        LoadedStep(DOUBLE, PROGRAMS, constants).run({"step/x": x}, do_nothing)


def test_values_between_programs_are_contiguous() -> None:
    """A program reads its inputs with the strides that it was compiled for."""

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return layer_operator((x + 1).mT, [x[:, 1:2].expand(2, 3)], None, 0, "")

    x = torch.arange(6.0).reshape(2, 3)
    part = cut_at_layers(torch.export.export(Model(), (x,), strict=False).graph, 1)[0]
    outputs = part.as_module()(x)
    assert all(output.is_contiguous() for output in outputs)
    assert torch.equal(outputs[0], (x + 1).mT)
