"""Model configurations, the decoder, and checkpoint loading. Knows no wire type."""
