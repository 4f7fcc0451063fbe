"""Fixtures, found by pytest through its own entry point.

This module is imported by every pytest run of the environment, so it imports nothing but pytest: the
fixtures import what they need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ..plugins import Registry


@pytest.fixture(scope="session")
def capture_registry() -> Registry:
    """What is installed, built afresh and with duplicates refused; broken plugins are in ``.broken``."""
    from ..plugins import build_registry

    return build_registry()
