"""vLLM's server in the background, asked over HTTP: to capture, and to answer."""
