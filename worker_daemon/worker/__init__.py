"""The worker: one method per operation, which calls the parts that it is composed of."""
