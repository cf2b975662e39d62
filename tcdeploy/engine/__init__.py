"""Warmed programs turned into tokens: buffers, graphs, sampling, and the generation loop."""
