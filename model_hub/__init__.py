"""Models and adapters by the names of their repositories, in Hugging Face's hub and its cache."""
