"""The worker: one method an operation, over the parts it is composed of."""
