"""The anatomy of Hugging Face models, for capture-hooks."""
