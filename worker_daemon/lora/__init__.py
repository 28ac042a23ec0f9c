"""LoRA adapters: their files, the host memory that keeps them, the device slots that run them."""
