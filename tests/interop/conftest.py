"""Test files here share `peer` and helper modules of this folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from peer import Peer


@pytest.fixture(scope="module")
def sglang() -> Iterator[Peer]:
    """SGLang's source, of any version."""
    peer = Peer("sglang", "sglang_source")
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def sglang_versions(sglang: Peer) -> list[str]:
    """Of SGLang, the oldest first."""
    return list(sglang("versions"))


@pytest.fixture(scope="module")
def sglang_families(sglang: Peer) -> dict[str, list[str]]:
    """Those whose classes are known, with file and served class."""
    return dict(sglang("families"))
