"""Products with a weight for decode batches, where streaming the weight from memory is all the work there is."""
