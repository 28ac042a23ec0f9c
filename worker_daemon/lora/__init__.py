"""LoRA adapters: their files, the host memory that stores them, and the device slots that steps
use."""
