"""Environment variables by which a process of vLLM's is asked for something; the launcher sets them."""

from __future__ import annotations

from typing import Final

#: The draft head whose witness is shown before the server is ready.
HEAD: Final = "CAPTURE_HOOKS_HEAD"
#: A directory for reports.
HANDSHAKE: Final = "CAPTURE_HOOKS_HANDSHAKE"
