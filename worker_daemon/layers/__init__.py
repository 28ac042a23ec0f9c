"""Building blocks of a tensor-parallel decoder in plain torch. Knows no model and no file."""
