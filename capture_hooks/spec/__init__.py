"""Points and capture specs: which hidden states, in which order.  Imports no torch."""

from .points import Point, Site
from .specs import CaptureSpec, ResolvedSpec

__all__ = ["CaptureSpec", "Point", "ResolvedSpec", "Site"]
