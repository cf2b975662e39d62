"""Linear layers of mixture-of-experts models: each row of the input is multiplied by the weight of its own expert."""
