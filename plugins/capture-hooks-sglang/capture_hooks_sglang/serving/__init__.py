"""What runs inside SGLang's server: the request for capture, the capture, its delivery and the witness."""
