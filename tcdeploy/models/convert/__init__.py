"""Changes of a model between its checkpoint and its programs: packed and stacked tensors, quantised weights, RoPE."""
