"""One module per model family: turns its config.json into a description of layers."""
