"""The classes that vLLM loads by their names. Nothing else of this project imports vLLM."""
