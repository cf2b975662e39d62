"""Private names of Dynamo, and of modules and tensors that it reads."""
