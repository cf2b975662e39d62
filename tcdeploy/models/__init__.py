"""From a model id to weights on the device: `probe` learns what the model is, `load` brings it in."""
