"""A reference that an earlier start stored: when it is used, when it is not, and what happens on a difference."""

from __future__ import annotations

import contextlib
import gc
import logging
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from tcdeploy.cache.record.manifest import Manifest, read_manifests
from tcdeploy.cache.record.unlisted import unlisted_files
from tcdeploy.cache.staging.folder import StagingFolder
from tcdeploy.engine.check import parity_check
from tcdeploy.engine.check.check_prompts import PromptPrefix
from tcdeploy.engine.check.reference import PrefixLogits, ReferenceLogits
from tcdeploy.engine.check.stored_reference import read_reference, stores_references, write_reference
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.errors import CompileError, IntegrityError
from tcdeploy.planning.recipe import build_recipe
from tcdeploy.start import model_code, sequence
from tcdeploy.start.deployment import Deployment
from tcdeploy.start.prepare import prepare
from tests.engine_loop import generate_tokens
from tests.model_families import save_config
from tests.parity.campaign import RECENT_OBJECTS
from tests.parity.planted_faults import FAULTS, planted

PLAN: Any = SimpleNamespace(compute_dtype="bfloat16", device="cpu", programs="jit", load_format="auto")
RECORD: Any = SimpleNamespace(parity=SimpleNamespace(attempts=1))


def make_reference(dtype: str = "float32") -> ReferenceLogits:
    torch.manual_seed(0)
    rows = {
        PromptPrefix(prompt, length): PrefixLogits(torch.randn(7).bfloat16(), torch.randn(7))
        for prompt, length in ((2, 5), (0, 9))
    }
    return ReferenceLogits(rows, dtype, torch.randn(3, 2, dtype=torch.float64))


def test_a_stored_reference_has_every_bit_of_the_computed_one(tmp_path: Path) -> None:
    reference = make_reference()
    assert write_reference(tmp_path / "new" / "a.safetensors", reference, PLAN, [RECORD])
    stored = read_reference(tmp_path / "new" / "a.safetensors")
    assert stored is not None and stored.dtype == "float32"
    assert torch.equal(stored.sampled_distances, reference.sampled_distances)
    assert stored.rows.keys() == reference.rows.keys()
    for prefix, (eager, precise) in reference.rows.items():
        assert torch.equal(stored.rows[prefix].eager, eager) and stored.rows[prefix].eager.dtype == eager.dtype
        assert torch.equal(stored.rows[prefix].precise, precise) and stored.rows[prefix].precise.dtype == precise.dtype


@pytest.mark.parametrize("content", [None, b"", b"no safetensors file", "other tensors"])
def test_a_file_without_a_reference_is_not_used(content: bytes | str | None, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        save_file({"prefixes": torch.zeros(1)}, path)
    assert read_reference(path) is None


def test_a_reference_that_later_starts_could_not_use_is_not_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.safetensors"
    repeated: Any = SimpleNamespace(parity=SimpleNamespace(attempts=2))
    assert not write_reference(path, make_reference(), PLAN, [RECORD, repeated])
    assert not write_reference(path, make_reference("bfloat16"), PLAN, [RECORD])
    assert not path.exists() and not caplog.messages
    (tmp_path / "file").touch()
    assert not write_reference(tmp_path / "file" / "a.safetensors", make_reference(), PLAN, [RECORD])
    assert "is not stored" in caplog.text


def test_a_full_disk_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = sum(row.nbytes for pair in make_reference().rows.values() for row in pair)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=size))
    assert not write_reference(tmp_path / "a.safetensors", make_reference(), PLAN, [RECORD])
    assert not (tmp_path / "a.safetensors").exists() and "the disk is full" in caplog.text


@pytest.mark.parametrize(
    ("changes", "is_stored"),
    [
        ({}, True),
        ({"device": "cuda"}, True),
        ({"load_format": "dummy"}, True),
        ({"device": "cuda", "load_format": "dummy"}, False),
        ({"programs": "aot"}, False),
    ],
)
def test_references_are_stored_for_jit_programs_but_not_for_random_weights_on_a_gpu(
    changes: dict[str, str], is_stored: bool
) -> None:
    plan: Any = SimpleNamespace(**{**vars(PLAN), **changes})
    assert stores_references(plan) is is_stored


class Starts:
    """Starts of a small model in one cache folder, uncompiled by default."""

    def __init__(self, folder: Path) -> None:
        self.cache = folder / "cache"
        self.model = save_config("llama", folder / "model", num_hidden_layers=2)
        self.computed = 0  # references, in the last start

    def start(self, fault: str = "", compiles: bool = False, **changes: Any) -> Deployment:
        recipe = {
            "model": self.model, "load_format": "dummy", "dtype": "bfloat16", "buckets": (32,), "batch_sizes": (4,),
            "cache_dir": str(self.cache), **changes,
        }  # fmt: skip
        self.computed = 0
        compute = parity_check.compute_references

        def count_and_compute(*args: Any) -> ReferenceLogits:
            self.computed += 1
            return compute(*args)

        with (
            mock.patch.object(parity_check, "compute_references", count_and_compute),
            planted(FAULTS[fault], uses_stored_reference=True) if fault else torch.no_grad(),
            contextlib.nullcontext() if compiles else torch.compiler.set_stance("force_eager"),
        ):
            return prepare(build_recipe(recipe, environ={}))

    def stored(self) -> list[str]:
        """The references that the manifests list, which are all that are in the folder."""
        listed = [file.path for manifest in read_manifests(self.cache).values() for file in manifest.files]
        assert not [path for path in unlisted_files(self.cache) if path.startswith(("references/", "conflicts/"))]
        return [path for path in listed if path.startswith("references/")]


@pytest.fixture
def starts(tmp_path: Path) -> Iterator[Starts]:
    (tmp_path / "model").mkdir()
    yield Starts(tmp_path)
    torch.compiler.reset()
    gc.collect(RECENT_OBJECTS)


def test_a_later_start_computes_no_reference_and_finds_the_same_distances(starts: Starts) -> None:
    first = starts.start()
    assert starts.computed == 1
    stored = starts.stored()
    assert len(stored) == 1
    second = starts.start()
    assert starts.computed == 0 and starts.stored() == stored
    for before, after in zip(first.records, second.records, strict=True):
        assert after.parity == before.parity
        assert after.eager_greedy_tokens == before.eager_greedy_tokens


def test_other_weights_have_a_reference_of_their_own(starts: Starts) -> None:
    starts.start()
    stored = starts.stored()
    finish_loading = model_code.ModelCode.finish_loading

    def finish_and_change(source: model_code.ModelCode, *args: Any) -> None:
        finish_loading(source, *args)
        source.runner.model.get_input_embeddings().weight.data[3, 5] += 1

    with mock.patch.object(model_code.ModelCode, "finish_loading", finish_and_change):
        starts.start()
        assert starts.computed == 1
        assert len(starts.stored()) == 1 and starts.stored() != stored
        starts.start()
        assert starts.computed == 0


@pytest.mark.parametrize(
    "change", ["plan", "sources of the model", "sources of this package", "prompts", "removed source"]
)
def test_a_start_computes_its_reference_if_the_name_differs(
    change: str, starts: Starts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    starts.start()
    flags: dict[str, Any] = {}
    module = "tcdeploy.engine.check.stored_reference"
    if change == "plan":
        flags["region"] = "blocks"
    elif change == "removed source":
        monkeypatch.setattr(f"{module}.model_sources", mock.Mock(side_effect=FileNotFoundError))
    elif change == "sources of the model":
        monkeypatch.setattr(f"{module}.model_sources", lambda model: {"edited": "0"})
    elif change == "sources of this package":
        (tmp_path / "package").mkdir()
        (tmp_path / "package" / "edited.py").touch()
        monkeypatch.setattr(f"{module}.PACKAGE", tmp_path / "package")
    else:
        monkeypatch.setattr(model_code, "FIRST_SEED", 5)
        monkeypatch.setattr(parity_check, "FIRST_SEED", 5)
    starts.start(**flags)
    assert starts.computed == 1
    assert (len(read_manifests(starts.cache)) == 2) == (change == "plan")


def shift_stored_logits() -> Any:
    """Replace the reader of stored references with one that adds 3 to the first logit of each row."""
    read = model_code.read_reference

    def read_and_shift(path: Path, device: str) -> ReferenceLogits | None:
        reference = read(path, device)
        if reference is None:
            return None
        rows = {prefix: PrefixLogits(*(logits.clone() for logits in pair)) for prefix, pair in reference.rows.items()}
        for pair in rows.values():
            for logits in pair:
                logits[0] += 3
        return reference._replace(rows=rows)

    return mock.patch.object(model_code, "read_reference", read_and_shift)


def test_a_model_that_differs_from_the_stored_reference_is_loaded_and_checked_again(
    starts: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    starts.start()
    load_runner, models = model_code.load_runner, []

    def load_one_at_a_time(*args: Any) -> Any:
        assert not [model for model in models if model() is not None], "the first model is freed before"
        runner = load_runner(*args)
        models.append(weakref.ref(runner.model))
        return runner

    with (
        shift_stored_logits(), caplog.at_level(logging.WARNING),
        mock.patch.object(model_code, "load_runner", load_one_at_a_time),
    ):  # fmt: skip
        deployment = starts.start()
    assert starts.computed == 1 and len(models) == 2
    assert "loaded again" in caplog.text and "prefill:32" in caplog.text
    assert all(record.parity.passed for record in deployment.records)
    assert len(starts.stored()) == 1
    starts.start()
    assert starts.computed == 0


@pytest.mark.parametrize("fault", ["wrong attention scale", "layer skipped", "block of another sequence"])
def test_a_fault_is_caught_with_a_stored_reference(
    fault: str, starts: Starts, caplog: pytest.LogCaptureFixture
) -> None:
    starts.start()
    with caplog.at_level(logging.WARNING), pytest.raises(CompileError, match="failed its parity check"):
        starts.start(fault)
    assert "loaded again" in caplog.text, "the stored reference showed the fault"
    assert starts.computed >= 1, "and so did a new one"


def test_a_fault_in_the_loaded_model_only_does_not_reach_its_own_reference(starts: Starts) -> None:
    """A module with a wrong epsilon would agree with a reference that is computed from the same module."""
    starts.start()
    install, models = model_code.install_programs, []

    def break_first_model(runner: Any, *args: Any, **options: Any) -> None:
        models.append(runner.model)
        if len(models) == 1:
            for layer in runner.model.model.layers:
                layer.input_layernorm.variance_epsilon = 1.0
        install(runner, *args, **options)

    with mock.patch.object(model_code, "install_programs", break_first_model):
        starts.start()
    assert len(models) == 2 and models[0] is not models[1]
    assert models[1].model.layers[0].input_layernorm.variance_epsilon < 1e-3
    assert starts.computed == 1


def test_a_changed_file_is_an_error_like_that_of_a_program(starts: Starts) -> None:
    starts.start()
    path = starts.cache / starts.stored()[0]
    tensors = load_file(path)
    save_file({**tensors, "precise": tensors["precise"] + 1}, path, {"dtype": "float32"})
    with pytest.raises(IntegrityError, match="does not match its recorded"):
        starts.start()
    starts.start(on_bad_cache="rebuild")
    assert starts.computed == 1


def test_another_plan_does_not_copy_the_reference(starts: Starts) -> None:
    starts.start()
    first = starts.stored()
    starts.start(batch_sizes=(2,))
    assert starts.computed == 1
    second = [path for path in starts.stored() if path not in first]
    assert len(second) == 1
    in_staging = [path.name for path in starts.cache.glob(".start-*/references/*")]
    assert in_staging == [Path(second[0]).name]


@pytest.mark.long  # compiles the model twice; others check it uncompiled
def test_a_compiled_model_is_checked_again_with_its_programs(starts: Starts) -> None:
    starts.start(compiles=True)
    with shift_stored_logits():
        deployment = starts.start(compiles=True)
    assert starts.computed == 1 and all(record.parity.passed for record in deployment.records)
    assert all(record.cache_misses == 0 for record in deployment.records)
    tokens = generate_tokens(deployment.engine, [[5, 6, 7]], SamplingParams(max_tokens=4))
    starts.start(compiles=True)
    assert starts.computed == 0
    assert len(tokens[0]) == 4


@pytest.mark.parametrize("kind", ["bundle", "read-only folder"])
def test_nothing_is_written_if_no_file_can_be_added(kind: str, starts: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    restore_plan = sequence.restore_plan

    def restore(staging: StagingFolder, *args: Any) -> Manifest | None:
        earlier = restore_plan(staging, *args)
        if kind == "bundle":
            staging.bundle = SimpleNamespace(files=(), signed_header=b"", lacks_measurements=False)  # type: ignore[assignment]
        else:
            monkeypatch.setattr(staging, "target", staging.path)
        return earlier

    monkeypatch.setattr(sequence, "restore_plan", restore)
    monkeypatch.setattr(model_code, "write_reference", mock.Mock(side_effect=AssertionError))
    monkeypatch.setattr(model_code, "reference_path", mock.Mock(side_effect=AssertionError))
    starts.start()
    assert starts.computed == 1
