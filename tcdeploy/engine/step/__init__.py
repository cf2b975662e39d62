"""How a step runs: static tensors, rows, CUDA graphs, programs, sampling."""
