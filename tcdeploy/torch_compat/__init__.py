"""Every use of a private name of torch, Triton, transformers or uvicorn: one file for each."""
