"""What each step computes: sequences, KV blocks, and the predicted time of steps. Does not import torch."""
