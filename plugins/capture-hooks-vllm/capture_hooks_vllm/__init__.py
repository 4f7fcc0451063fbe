"""vLLM for capture-hooks: capture engine and server of proven heads."""

from typing import Final

#: The setting that names a draft head, whose witness is shown before the server is ready.
HEAD: Final = "CAPTURE_HOOKS_HEAD"
