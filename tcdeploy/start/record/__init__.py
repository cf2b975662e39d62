"""What a start records, so that a later one needs neither the model's code nor the compiler."""
