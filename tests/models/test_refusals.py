"""A model that cannot be served is refused with all reasons at once, and with a hint that leads to no other refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen2Model,
)

from tcdeploy.errors import (
    ARCHITECTURE_HINT,
    ModelError,
    SpaceError,
    UnsupportedArchitectureError,
    UnsupportedModelError,
)
from tcdeploy.models.formats.methods import NOT_QUANTISED_HINT
from tcdeploy.models.refusals import Refusals, SeveralReasonsError
from tcdeploy.planning.recipe import Recipe
from tcdeploy.start.decide import decide
from tests.coverage.small_configs import small_config
from tests.model_families import SUPPORTED, UNSUPPORTED, probe, save_config

AQLM = {"quant_method": "aqlm", "in_group_size": 8}


def change_config(folder: str | Path, **values: Any) -> None:
    path = Path(folder, "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def refusal(folder: str | Path, **fields: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        decide(Recipe(model=str(folder), load_format="dummy", **fields))
    return caught.value


def test_a_quantised_recurrent_model_is_refused_and_no_unquantised_original_is_suggested(tmp_path: Path) -> None:
    small_config("recurrent_gemma").save_pretrained(tmp_path)
    change_config(tmp_path, quantization_config=AQLM)
    error = refusal(tmp_path)
    assert error.message.startswith(f"{tmp_path} cannot be served, for 3 reasons:")
    assert "is quantised with aqlm" in error.message and "layers of type linear_attention" in error.message
    assert error.hint == ARCHITECTURE_HINT and "bfloat16" not in error.hint


def test_a_quantised_model_whose_original_exceeds_the_memory_is_refused_for_both(tmp_path: Path) -> None:
    wide = {"hidden_size": 32768, "intermediate_size": 131072, "num_hidden_layers": 60}
    error = refusal(save_config("llama", tmp_path, quantization_config=AQLM, **wide))
    assert "is quantised with aqlm" in error.message and "leave no memory for KV" in error.message
    assert error.exit_code == 1 and "; and use a smaller model" in error.hint


def test_what_this_machine_lacks_is_no_reason_in_a_dry_run(tmp_path: Path) -> None:
    folder = save_config("llama", tmp_path, quantization_config=AQLM, hidden_size=32768, num_hidden_layers=60)
    with pytest.raises(UnsupportedModelError) as caught:
        decide(Recipe(model=folder, load_format="dummy"), is_dry_run=True)
    assert "is quantised with aqlm" in caught.value.message and "memory" not in caught.value.message


def test_a_quantised_model_alone_keeps_its_hint(tmp_path: Path) -> None:
    error = refusal(save_config("llama", tmp_path, quantization_config=AQLM))
    assert type(error) is UnsupportedModelError and error.hint == NOT_QUANTISED_HINT


def test_a_quantised_adapter_folder_has_both_reasons_and_both_hints(tmp_path: Path) -> None:
    folder = save_config("llama", tmp_path, quantization_config=AQLM)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    error = refusal(folder)
    assert "PEFT adapter" in error.message and "quantised" in error.message
    assert "merge_and_unload" in error.hint and NOT_QUANTISED_HINT in error.hint


def test_all_types_of_layers_are_named() -> None:
    types = ["chunked_attention", "full_attention", "linear_attention", "full_attention"]
    sizes = {**SUPPORTED["qwen3"], "num_hidden_layers": 4}
    with pytest.raises(UnsupportedArchitectureError, match="of type chunked_attention, linear_attention, which"):
        probe(AutoConfig.for_model("qwen3", **sizes, layer_types=types))


def test_layers_of_a_refused_type_are_not_reported_again_as_lacking_attention() -> None:
    for family in ("mamba", "qwen3_next"):
        with pytest.raises(UnsupportedModelError, match="linear_attention") as caught:
            probe(AutoConfig.for_model(family, **UNSUPPORTED[family][0]))
        assert "never call" not in caught.value.message


def test_an_attribute_that_the_config_lacks_does_not_hide_the_reasons() -> None:
    """RecurrentGemma's config has a window, and no max_position_embeddings."""
    with pytest.raises(UnsupportedModelError, match="layers of type linear_attention") as caught:
        probe(small_config("recurrent_gemma"))
    assert "has no max_position_embeddings in its config" in caught.value.message


def test_a_combined_error_keeps_the_causes_and_lists_no_reason_twice() -> None:
    refusals, cause = Refusals("x"), RuntimeError("original")
    for _ in range(2):
        with refusals.collecting():
            raise UnsupportedModelError("first", "cure of the first") from cause
    assert len(refusals.reasons) == 1
    inner = SeveralReasonsError("y", [UnsupportedModelError("second", "cure of the second"), SpaceError("third", "")])
    refusals.add(inner)
    with pytest.raises(SeveralReasonsError) as caught:
        refusals.raise_all()
    assert caught.value.message == "x cannot be served, for 3 reasons:\n  - first\n  - second\n  - third"
    assert caught.value.hint == "cure of the first; and cure of the second"
    assert caught.value.__cause__ is cause


def test_one_reason_is_raised_as_it_is() -> None:
    refusals = Refusals("x")
    refusals.raise_all()  # none
    with refusals.collecting():
        raise SpaceError("only", "hint")
    with pytest.raises(SpaceError, match="^only$"):
        refusals.raise_all()


# Models that do not generate text


def small_qwen(tied: bool = False) -> Qwen2Config:
    return Qwen2Config(**SUPPORTED["qwen2"], tie_word_embeddings=tied)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("model_class", "kind"),
    [
        (Qwen2ForSequenceClassification, "a reward or classification model (Qwen2ForSequenceClassification)"),
        (Qwen2ForTokenClassification, "a reward or classification model (Qwen2ForTokenClassification)"),
    ],
)
def test_reward_models_are_refused_by_their_kind(model_class: Any, kind: str, tied: bool, tmp_path: Path) -> None:
    """With tied embeddings, such a checkpoint would load and generate meaningless text."""
    model_class(small_qwen(tied)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError) as caught:
        decide(Recipe(model=str(tmp_path)))
    assert caught.value.message == f"{tmp_path} is {kind}, which does not generate text"
    assert "download" not in caught.value.hint and "text generator" in caught.value.hint


def test_a_model_without_a_head_is_refused_unless_its_head_is_the_embedding(tmp_path: Path) -> None:
    Qwen2Model(small_qwen()).save_pretrained(tmp_path / "untied")
    with pytest.raises(UnsupportedModelError, match=r"without a language model head, as for embeddings \(Qwen2Model\)"):
        decide(Recipe(model=str(tmp_path / "untied")))
    Qwen2Model(small_qwen(tied=True)).save_pretrained(tmp_path / "tied")
    assert decide(Recipe(model=str(tmp_path / "tied"))).plan.weight_bytes


@pytest.mark.parametrize("name", ["modules.json", "config_sentence_transformers.json"])
def test_a_folder_of_sentence_transformers_is_an_embedding_model(name: str, tmp_path: Path) -> None:
    """Qwen3-Embedding names a causal LM in `architectures`."""
    folder = save_config("qwen3", tmp_path, architectures=["Qwen3ForCausalLM"])
    (tmp_path / name).write_text("[]")
    assert f"an embedding model of sentence-transformers (it has {name})" in refusal(folder).message


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("InternLM2ForRewardModel", "reward"), ("LlamaBidirectionalModel", "embedding"),
        ("Qwen3ForMaskedLM", "fill-mask"), ("Gemma2ForSequenceClassification", "reward or classification"),
    ],
)  # fmt: skip
def test_the_kind_follows_from_the_class_that_the_config_names(architecture: str, kind: str, tmp_path: Path) -> None:
    assert f"{kind}" in refusal(save_config("qwen2", tmp_path, architectures=[architecture])).message


@pytest.mark.parametrize(
    "architectures", [None, ["Qwen2ForCausalLM"], ["MyOwnModel"], ["Qwen2Model", "Qwen2ForCausalLM"]]
)
def test_other_classes_are_accepted(architectures: Any, tmp_path: Path) -> None:
    folder = save_config("qwen2", tmp_path)
    change_config(folder, architectures=architectures)
    assert decide(Recipe(model=folder, load_format="dummy")).plan.key


def test_no_generator_of_transformers_looks_like_a_model_for_another_task() -> None:
    from transformers.models.auto import modeling_auto

    from tcdeploy.models.auto_classes import kind_of

    mappings = (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )
    values = [value for mapping in mappings for value in mapping.values()]
    names = [name for value in values for name in ([value] if isinstance(value, str) else value)]
    assert len(names) > 200 and [name for name in names if kind_of(name)] == []


# Reasons instead of the text of an exception


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mpt", "mpt never calls transformers' AttentionInterface"),
        ("kosmos-2", "kosmos-2 requires inputs other than text: 'pixel_values', 'image_embeds'"),
        ("idefics", "idefics requires inputs other than text: 'pixel_values'"),
        ("gemma4_assistant", "has no keys and values of its own: each of its 4 layers attends to those of another"),
    ],
)  # fmt: skip
def test_a_failure_of_the_modelling_code_is_stated_as_its_reason(model_type: str, reason: str) -> None:
    if model_type not in CONFIG_MAPPING:
        pytest.skip("this transformers does not have the type")
    with pytest.raises(UnsupportedModelError) as caught:
        probe(small_config(model_type))
    assert reason in caught.value.message and "NoneType" not in caught.value.message


@pytest.mark.parametrize("model_type", ["qwen2_5_omni", "qwen3_omni_moe"])
def test_a_class_that_only_combines_models_has_no_forward_pass(model_type: str) -> None:
    with pytest.raises(
        UnsupportedArchitectureError, match=r"combines several models: \w+ has no forward pass of its own"
    ):
        probe(CONFIG_MAPPING[model_type]())


def test_an_exception_that_is_not_recognised_is_stated_with_the_step_and_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers.models.llama import modeling_llama

    def forward(self: Any, x: Any) -> Any:
        raise RuntimeError("the tables are turned")

    config = AutoConfig.for_model("llama", **SUPPORTED["llama"])
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", forward)
    with pytest.raises(UnsupportedArchitectureError) as caught:
        probe(config)
    line = r"cannot be run on fake tensors: RuntimeError: the tables are turned \(modeling_llama.py, line \d+\)"
    assert caught.match(line)
    config.num_attention_heads = 0
    with pytest.raises(
        UnsupportedModelError, match=r"cannot be built from its config.json: ZeroDivisionError: "
    ) as built:
        probe(config)
    assert "config.json" in built.value.hint
