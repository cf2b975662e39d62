"""Custom ops with their references in plain PyTorch, and the Triton kernels behind them."""
