"""The hot path: request rows, step inputs, the forward pass, sampling, output. Knows no socket and
no lifecycle."""
