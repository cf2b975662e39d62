"""Changes of a model between its checkpoint and its programs: packing, traces of conversions, quantised weights, RoPE."""
