"""Checks that a bucket computes what the model's own code computes: at a start, and while it serves."""
