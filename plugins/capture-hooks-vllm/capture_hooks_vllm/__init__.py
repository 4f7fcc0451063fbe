"""vLLM for capture-hooks: capture engine and server of proven heads."""
