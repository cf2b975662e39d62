"""Changes of a model between its checkpoint and its programs: packed tensors, traces of conversions, quantised weights, RoPE."""
