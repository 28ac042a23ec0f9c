"""Model configurations, the decoder, and checkpoint loading."""
