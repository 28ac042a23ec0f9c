"""Weight updates of a running worker."""
