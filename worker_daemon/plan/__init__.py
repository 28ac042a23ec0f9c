"""Memory planning from a model's configuration alone."""
