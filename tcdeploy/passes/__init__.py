"""Passes over the FX graphs that Inductor lowers: one technique per file, each of which can be deleted."""
