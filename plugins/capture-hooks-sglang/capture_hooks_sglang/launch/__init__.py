"""Outside SGLang's server: what is run, what is refused before it, and its life under a handshake."""
