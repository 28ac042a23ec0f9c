"""Building blocks of a tensor-parallel decoder. Knows no model and no file."""
