"""What a server process was asked to capture; without a request, nothing in it changes.

A request is a draft head with a ``capture`` section, or ``CAPTURE_HOOKS_SPEC``.  With both, the setting
says what is captured and the head says what is right: the witness decides whether they agree.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from capture_hooks.engines.reports import Verify, verify_of
from capture_hooks.errors import EngineError, HeadError
from capture_hooks.heads import HeadDescription, Witness, inspect_head
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec, Point

logger = logging.getLogger(__name__)

#: Capture these points, in this order, whatever the head says.
SPEC: Final = "CAPTURE_HOOKS_SPEC"
#: A directory where captured rows are left for ``capture-hooks dump``.
SPOOL: Final = "CAPTURE_HOOKS_SPOOL"


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """A request for capture.

    Attributes:
        spec: the points in the order they are delivered.
        head: the draft head's directory as described by itself; None without one.
        verify: what a witness that does not fit does.
        source: who asked, for messages.
    """

    spec: CaptureSpec
    head: HeadDescription | None
    verify: Verify
    source: str

    @property
    def truth(self) -> tuple[Point, ...]:
        """What the head was trained on, in the order its ``fc`` takes it; empty where nothing says."""
        return self.head.file_inputs if self.head is not None else ()

    def witness(self) -> Witness | None:
        """The head's witness.

        Raises:
            HeadError: it is missing or damaged.
        """
        if self.head is None or self.head.section is None:
            return None
        return Witness.load(self.head.directory / self.head.section.witness.file)


def capture_request(environment: Mapping[str, str], draft: str | None) -> CaptureRequest | None:
    """Read the request, or None where there is none.

    Args:
        environment: of the server process.
        draft: the draft model's path, as the server was given it.

    Raises:
        SpecError: the setting is no capture spec.
        HeadError: a head that contradicts itself, or whose section this version cannot read.
        EngineError: a setting with another value than it takes; points that do not fit the head.
    """
    verify = verify_of(environment)
    head = _head(draft)
    text = environment.get(SPEC)
    if text is None:
        if head is None:
            return None
        spec = CaptureSpec(inputs=head.file_inputs, target=_spec(head).target)
        return CaptureRequest(spec, head, verify, f"the head {head.directory}")
    spec = CaptureSpec.parse(text)
    if head is not None and len(spec) != len(head.file_inputs):
        raise EngineError(
            f"{SPEC} asks for {len(spec)} points ({spec}), and the head {head.directory} eats "
            f"{len(head.file_inputs)} ({', '.join(map(str, head.file_inputs))})"
        )
    return CaptureRequest(spec, head, verify, SPEC)


def _head(draft: str | None) -> HeadDescription | None:
    """The draft head, where it is a directory with a capture section."""
    if draft is None or not (Path(draft) / "config.json").is_file():
        return None
    if "capture" not in _config(Path(draft)):
        return None
    try:
        return inspect_head(draft, conventions=registry().conventions)
    except HeadError as error:
        # Ids edited by hand: stock SGLang would serve those; the section is served here, and proven.
        head = inspect_head(draft, ids=False)
        logger.warning("capture-hooks: %s; what the capture section says is served", error)
        return head


def _config(directory: Path) -> Mapping[str, object]:
    try:
        read = json.loads((directory / "config.json").read_text())
    except (OSError, ValueError):
        return {}  # SGLang reads it too, and says what is wrong with it
    return read if isinstance(read, dict) else {}


def _spec(head: HeadDescription) -> CaptureSpec:
    assert head.spec is not None
    return head.spec
