"""What a training step costs with and without gradient alignment: time, and the memory of live tensors."""
