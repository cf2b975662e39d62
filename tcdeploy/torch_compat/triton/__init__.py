"""Private names of Triton and of the CUDA driver."""
