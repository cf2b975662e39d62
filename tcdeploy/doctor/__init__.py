"""Checks whether a machine can deploy models with tcdeploy: `tcdeploy doctor`."""
