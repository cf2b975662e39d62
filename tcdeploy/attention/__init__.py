"""Attention as custom ops over a paged KV cache, bridged to transformers' AttentionInterface."""
