"""Stands in for a GPU that the machine does not have, so that torch and Triton compile for it. One process, one GPU.

The functions replace names of torch, Inductor and Triton for the rest of the process, so only the process of a build
calls them (start/blind/build.py). A name that another version of torch has moved ends the build with an error that
names it.
"""
