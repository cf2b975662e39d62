"""Builds the programs of a plan for a GPU that the machine does not have, and checks them at their first start."""
