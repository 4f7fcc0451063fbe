"""What runs inside vLLM's worker processes: the witness is shown there before the server is ready."""
