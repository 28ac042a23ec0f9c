"""One module a model family: what its config.json says, as a description of layers."""
