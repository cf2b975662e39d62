"""Compares the answers of an engine with those of transformers, by tokens and by log-probabilities, in float32.

Greedy tokens must be those of `generate`. For a random model this proves little: scaled logits have the same maximum,
and some models repeat a few tokens. So the log-probabilities of prompt tokens, greedy tokens and sampled tokens must
also be within MAX_DIFFERENCE of those of transformers' forward pass over the same tokens, without a cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tcdeploy.engine.engine import Engine
from tcdeploy.engine.schedule.sequence import SamplingParams
from tcdeploy.models.auto_classes import auto_class
from tests.engine_loop import new_tokens

NEW_TOKENS = 24
PROMPTS = [
    [(7 * position + 11 * row) % 230 + 3 for position in range(length)] for row, length in enumerate((70, 5, 19))
]
GREEDY = SamplingParams(max_tokens=NEW_TOKENS, logprobs=0, prompt_logprobs=0)
SAMPLED = SamplingParams(max_tokens=NEW_TOKENS, logprobs=0, prompt_logprobs=0, temperature=1.0, seed=7)
MAX_DIFFERENCE = 1e-4  # of a log-probability, natural logarithm


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]  # of the prompt's tokens after the first, and then of `tokens`


class Answers(NamedTuple):
    """Each list has one answer per prompt."""

    greedy: list[Answer]
    sampled: list[Answer]


def answer(engine: Engine) -> Answers:
    """The engine's answers to PROMPTS, sent as one batch: first greedy, then sampled."""
    return Answers(_answer(engine, GREEDY), _answer(engine, SAMPLED))


def _answer(engine: Engine, params: SamplingParams) -> list[Answer]:
    answers = []
    for received in new_tokens(engine, PROMPTS, params):
        entries = [*(received[0].prompt_logprobs or ()), *(token.logprobs for token in received)]
        answers.append(Answer([token.token_id for token in received], [entry.chosen for entry in entries if entry]))
    return answers


class Reference:
    """transformers' model of a folder. difference: the largest difference of a log-probability in all comparisons."""

    def __init__(self, config: Any, folder: str) -> None:
        model_class = auto_class(config, trust_remote_code=False)
        self._model: Any = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self._greedy: list[list[int]] = []
        self.difference = 0.0

    def compare(self, answers: Answers) -> str:
        """What is wrong with the answers; "" if nothing is."""
        for kind, of_prompts in answers._asdict().items():
            for prompt, given in zip(PROMPTS, of_prompts, strict=True):
                expected = self._logprobs([*prompt, *given.tokens])
                actual = torch.tensor(given.logprobs, dtype=torch.float64)
                if len(actual) != len(expected):
                    return f"{kind}: {len(actual)} log-probabilities instead of {len(expected)}"
                difference = (actual - expected).abs()
                self.difference = max(self.difference, difference.max().item())
                if not (difference <= MAX_DIFFERENCE).all():  # NaN fails too
                    place = int(difference.nan_to_num(torch.inf).argmax())
                    part = "prompt" if place < len(prompt) - 1 else f"{kind} answer"
                    return (
                        f"a log-probability of the {part} is {actual[place]:.6f} instead of {expected[place]:.6f} "
                        f"(position {place + 1} of a prompt of {len(prompt)} tokens)"
                    )
        self._greedy = self._greedy or [self._generate(prompt) for prompt in PROMPTS]
        tokens = [given.tokens for given in answers.greedy]
        return "" if tokens == self._greedy else f"{tokens} instead of {self._greedy}"

    @torch.no_grad()
    def _logprobs(self, tokens: list[int]) -> torch.Tensor:
        """The log-probability of each token but the first: [tokens - 1] float64."""
        ids = torch.tensor([tokens])
        logits = self._model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, :-1]
        logprobs: torch.Tensor = logits.double().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return logprobs

    @torch.no_grad()
    def _generate(self, prompt: list[int]) -> list[int]:
        """The greedy tokens of `generate`. End-of-sequence tokens do not stop it."""
        ids = torch.tensor([prompt])
        output = self._model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
            eos_token_id=-1, pad_token_id=0,
        )  # fmt: skip
        tokens: list[int] = output[0].tolist()[-NEW_TOKENS:]
        return tokens
