"""FX passes over the post-grad graphs that Inductor lowers: one technique per file, each of which can be deleted."""
