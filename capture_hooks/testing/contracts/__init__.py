"""What a plugin promises, as test classes: subclass one in your tests, say what it tests, run pytest.

>>> from capture_hooks.testing.contracts import ConventionContract
>>> class TestMine(ConventionContract):  # doctest: +SKIP
...     convention = MyConvention()

They use plain ``assert`` and pytest; importing this package imports no torch.
"""

from typing import TYPE_CHECKING

from .anatomy import AnatomyContract
from .convention import ConventionContract

if TYPE_CHECKING:
    from .head import HeadContract, StepwiseHeadContract

__all__ = ["AnatomyContract", "ConventionContract", "HeadContract", "StepwiseHeadContract"]


def __getattr__(name: str) -> object:
    if name in ("HeadContract", "StepwiseHeadContract"):
        from . import head

        return getattr(head, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
