"""Private names of transformers."""
