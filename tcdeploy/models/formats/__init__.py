"""The formats of quantised checkpoints: which tensors are a weight, and what they become."""
