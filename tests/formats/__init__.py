"""Checkpoints in the quantisation formats that people deploy, as public ones look, with the weights they stand for.

A module for each family of formats states the facts of the format, writes it from a small dense model, and defines the
value of one element. The readers of the package are tested with the folders that these modules write. Nothing here
imports a reader, and tests compare the values with the format's own tool where it is installed.
"""
