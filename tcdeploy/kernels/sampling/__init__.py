"""The Triton kernels that end a step on the device."""
