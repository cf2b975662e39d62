"""Random lengths of prompts and outputs, in tokens. Does not import torch.

`uniform`: each length is uniform within +-spread of its nominal value, and the two are independent.

`sharegpt`: two independent log-normal distributions, clipped to 4..1,024 tokens. Their means, 217 tokens in and 198
out, are those that `vllm bench serve --dataset-name sharegpt` reports for 1,000 conversations of ShareGPT_V3 (the first
prompt and answer of each). The medians follow from the means and from assumed standard deviations of the logarithm
(1.5 and 1.0). So it has the means and the skew of that load, but it is not fitted to the dataset: quantiles differ,
prompt and output lengths are not correlated, and the tokens are random.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

DISTRIBUTIONS = ("uniform", "sharegpt")
SHAREGPT_MIN_TOKENS, SHAREGPT_MAX_TOKENS = 4, 1024


class LogNormal(NamedTuple):
    """A log-normal distribution of lengths; `sigma` is the standard deviation of the natural logarithm."""

    median: float  # tokens
    sigma: float

    def draw(self, rng: random.Random) -> int:
        tokens = round(rng.lognormvariate(math.log(self.median), self.sigma))
        return min(max(tokens, SHAREGPT_MIN_TOKENS), SHAREGPT_MAX_TOKENS)


SHAREGPT_INPUT, SHAREGPT_OUTPUT = LogNormal(97, 1.5), LogNormal(126, 1.0)


class Lengths(NamedTuple):
    """Tokens of a prompt, or of its last turn, and of the output."""

    input: int
    output: int


def draw_lengths(
    distribution: str, input_length: int, output_length: int, spread: float, rng: random.Random
) -> Lengths:
    """One pair of lengths. The last three values before `rng` apply to `uniform` only."""
    if distribution == "sharegpt":
        return Lengths(SHAREGPT_INPUT.draw(rng), SHAREGPT_OUTPUT.draw(rng))
    return Lengths(_draw_uniform(input_length, spread, rng), _draw_uniform(output_length, spread, rng))


def _draw_uniform(nominal: int, spread: float, rng: random.Random) -> int:
    low, high = nominal * (1 - spread), nominal * (1 + spread)
    return max(1, rng.randint(math.ceil(low), math.floor(high)))
