"""What a plugin promises, as test classes: subclass one in your tests, say what it tests, run pytest.

>>> from capture_hooks.testing.contracts import ConventionContract
>>> class TestMine(ConventionContract):  # doctest: +SKIP
...     convention = MyConvention()

They use plain ``assert`` and pytest; importing them imports no torch.
"""

from .anatomy import AnatomyContract
from .convention import ConventionContract
from .head import HeadContract

__all__ = ["AnatomyContract", "ConventionContract", "HeadContract"]
