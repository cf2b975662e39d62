"""Explains what torch.compile does with the regions of a model: `tcdeploy explain`."""
