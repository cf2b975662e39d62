"""The campaign's comparison finds wrong log-probabilities although the greedy tokens are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tcdeploy.engine.engine import Engine
from tests.coverage import campaign
from tests.coverage.campaign import check_type
from tests.coverage.comparison import MAX_DIFFERENCE, NEW_TOKENS, PROMPTS, Answer, Answers, Reference, answer
from tests.coverage.small_configs import small_config


def scale_head(engine: Engine) -> None:
    """The most likely token stays the same."""
    engine.runner.model.lm_head.weight.data *= 1.01


def change_one_embedding(engine: Engine) -> None:
    """Of one token of the first prompt."""
    embeddings: Any = engine.runner.model.model.embed_tokens
    embeddings.weight.data[PROMPTS[0][68]] *= 1.01


@pytest.mark.parametrize("plant", [scale_head, change_one_embedding])
def test_a_fault_that_leaves_greedy_tokens_equal_is_wrong(
    plant: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is planted after the parity check, which would find it too."""
    tokens: list[list[list[int]]] = []

    def damaged_answer(engine: Engine) -> Answers:
        tokens.append([each.tokens for each in answer(engine).greedy])
        plant(engine)
        answers = answer(engine)
        tokens.append([each.tokens for each in answers.greedy])
        return answers

    monkeypatch.setattr(campaign, "answer", damaged_answer)
    result = check_type("llama", str(tmp_path), compiles=False)
    before, after = tokens
    assert before == after, "the fault must not change greedy tokens"
    assert result.verdict == "wrong" and "a log-probability of the prompt is" in result.reason, result
    assert result.difference > MAX_DIFFERENCE


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    folder, config = tmp_path_factory.mktemp("model"), small_config("llama")
    campaign.save_model(config, folder)
    return Reference(config, str(folder))


def right_answers(reference: Reference) -> Answers:
    greedy = [reference._generate(prompt) for prompt in PROMPTS]
    sampled = [[(7 * row + 3 * place) % 200 for place in range(NEW_TOKENS)] for row in range(len(PROMPTS))]
    return Answers(
        *(
            [
                Answer(tokens, reference._logprobs([*prompt, *tokens]).tolist())
                for prompt, tokens in zip(PROMPTS, each, strict=True)
            ]
            for each in (greedy, sampled)
        )
    )


def test_right_answers_pass(reference: Reference) -> None:
    assert reference.compare(right_answers(reference)) == ""


@pytest.mark.parametrize(("position", "part"), [(0, "prompt"), (-1, "sampled answer")])
@pytest.mark.parametrize("change", [2 * MAX_DIFFERENCE, float("nan")])
def test_one_wrong_number_is_found(reference: Reference, position: int, part: str, change: float) -> None:
    answers = right_answers(reference)
    answers.sampled[1].logprobs[position] += change
    assert f"a log-probability of the {part} is" in reference.compare(answers)


def test_other_greedy_tokens_are_found(reference: Reference) -> None:
    """With the right log-probabilities of these tokens."""
    answers = right_answers(reference)
    tokens = [*answers.greedy[0].tokens[:-1], (answers.greedy[0].tokens[-1] + 1) % 200]
    answers.greedy[0] = Answer(tokens, reference._logprobs([*PROMPTS[0], *tokens]).tolist())
    assert "instead of" in reference.compare(answers)


def test_missing_numbers_are_found(reference: Reference) -> None:
    answers = right_answers(reference)
    answers.greedy[0].logprobs.pop()
    assert reference.compare(answers) == f"greedy: {68 + NEW_TOKENS} log-probabilities instead of {69 + NEW_TOKENS}"
