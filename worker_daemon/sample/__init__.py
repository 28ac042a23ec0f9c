"""From logits to tokens, purely by (seed, position, logits). Knows no model and no socket."""
