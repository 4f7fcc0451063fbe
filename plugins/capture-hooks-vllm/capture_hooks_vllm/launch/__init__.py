"""Outside vLLM: its command line, and what is refused before it is run."""
