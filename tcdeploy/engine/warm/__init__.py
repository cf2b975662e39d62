"""Warms every bucket: compiles, tunes, times and captures its step."""
