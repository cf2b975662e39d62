"""What a deployment does on this machine, in figures: decode, prefill, throughput, startup, each beside its floor."""
