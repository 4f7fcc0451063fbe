"""Do an engine's states fit what the head was trained on, and if not, what are they?"""

from .fit import SlotFit, WiringFit, fit_wiring

__all__ = ["SlotFit", "WiringFit", "fit_wiring"]
