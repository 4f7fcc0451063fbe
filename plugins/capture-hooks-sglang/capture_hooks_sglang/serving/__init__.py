"""Inside a server of SGLang's: what is asked of it, how it is captured and delivered, and the proof."""
