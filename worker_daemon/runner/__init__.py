"""The hot path: request rows, step inputs, the forward pass, sampling, output."""
