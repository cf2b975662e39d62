"""What changes a model between its checkpoint and its programs: packing, conversions, quantised weights, RoPE."""
