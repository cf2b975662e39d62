"""Model loading: `probe` determines the architecture, `load` loads config, weights and tokenizer."""
