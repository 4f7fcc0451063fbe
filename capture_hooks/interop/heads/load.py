"""Another library's head as an object: what `load_head` does with a directory that has no capture section."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...capture.anatomy import Anatomy
from ...conventions import Conventions
from ...errors import HeadError
from ...heads.contract import DraftHead
from ...heads.witness import warn
from ...spec import CaptureSpec
from .draft import Target
from .open import open_head
from .ours import cannot_say, restore
from .settle import settle


def load_foreign(
    directory: Path,
    anatomy: Anatomy,
    spec: CaptureSpec | None,
    written_for: str | None,
    unverified: bool,
    settings: Mapping[str, Any] | None,
    pickles: bool,
    conventions: Conventions,
) -> DraftHead:
    """A head of another library for a target, in its own precision; see `load_head` for the arguments.

    Warns:
        HeadWarning: it carries no witness, so what it eats is taken on trust.

    Raises:
        HeadError: see `settle.settle`; or our head would compute something else.
    """
    draft = settle(
        open_head(directory, pickles=pickles),
        Target.of_anatomy(anatomy),
        written_for,
        spec,
        unverified,
        conventions,
    )
    draft.spec.resolve(anatomy.n_layers, anatomy.split_boundaries)
    if losses := (*draft.losses, *cannot_say(draft)):
        raise HeadError(f"{directory} cannot be used as it is: {'; '.join(losses)}")
    head = restore(draft, anatomy, settings)
    warn(f"{directory} carries no witness: that it eats {draft.spec} is taken on trust")
    return head
