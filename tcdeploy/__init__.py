"""tcdeploy: from a Hugging Face causal LM to a running, compiled deployment in plain PyTorch."""

__version__ = "0.1.0"
