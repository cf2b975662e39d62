"""Turns prompts into tokens with warmed programs: scheduling, step buffers, CUDA graphs, sampling."""
