"""LoRA adapters: files, host memory, and the device slots that steps use."""
