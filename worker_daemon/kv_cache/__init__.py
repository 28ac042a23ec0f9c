"""The paged KV cache: what layers need, and where it lies. Knows no request."""
