"""Config and tokenizer of a GGUF file that has no config.json beside it."""
