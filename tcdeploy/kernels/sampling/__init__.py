"""The end of a step on the device: greedy tokens, sampling and log-probabilities, in Triton and in plain torch."""
