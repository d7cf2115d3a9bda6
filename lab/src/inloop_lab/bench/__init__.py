"""The cost of a training step with and without gradient alignment: time, and the memory of live tensors."""
