"""Do an engine's states fit what the head was trained on, and if not, what are they?"""

from .fit import SlotFit, Verdict, WiringFit, fit_wiring

__all__ = ["SlotFit", "Verdict", "WiringFit", "fit_wiring"]
