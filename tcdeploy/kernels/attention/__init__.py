"""Attention as custom ops over a paged KV cache, registered with transformers' AttentionInterface."""
