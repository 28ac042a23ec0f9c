"""Building blocks of a tensor-parallel decoder."""
