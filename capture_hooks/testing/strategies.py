"""Hypothesis strategies (being written)."""


def register() -> None:
    """Called by Hypothesis itself."""
