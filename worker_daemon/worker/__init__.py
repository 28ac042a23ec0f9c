"""The worker: one method per operation, over the parts that it is composed of."""
