"""A trainer's side of weight updates. The only part of the client that needs torch: nothing else of
it imports this package."""
