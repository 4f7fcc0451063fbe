"""Inside vLLM's processes."""
