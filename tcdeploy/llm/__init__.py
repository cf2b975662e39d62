"""The library: `LLM` and `AsyncLLM` generate text with a deployment in this process."""
