"""Triton kernels for the linear layers of decode batches, which are bound by streaming the weight from memory."""
