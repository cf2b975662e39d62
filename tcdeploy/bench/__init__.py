"""Benchmarks of a deployment: decode, prefill, throughput, serving and startup, beside the hardware's floor."""
