"""Does this target honour a tree mask?  Asked of the model itself, not of a list of class names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import DecodingError
from ..heads.drafting import Proposal
from . import caches

if TYPE_CHECKING:
    from .target import Target

#: A sibling's logits must be this much nearer to its own branch than to the line with both siblings.
_MARGIN = 0.1


def require_tree(target: Target) -> None:
    """Check that siblings do not see each other and take the same position.

    Runs a prompt of a few tokens, then two siblings in one pass, and compares the second one's logits
    with those of its own branch and with those of the line in which it follows the first.

    Raises:
        DecodingError: with the reason; a chain still works.
    """
    vocabulary = target.anatomy.vocab_size
    prompt = [token % vocabulary for token in (11, 5, 7)]
    root, first, second = (token % vocabulary for token in (13, 17, 19))
    with torch.inference_mode():
        _start(target, prompt)
        if obstacle := caches.tree_obstacle(target.cache):
            raise DecodingError(
                f"a draft tree cannot be verified with this target: {obstacle}; use a chain (tree=None)"
            )
        line, _ = target.verify(root, Proposal.chain([first, second]))
        _start(target, prompt)
        branch, _ = target.verify(root, Proposal.chain([second]))
        _start(target, prompt)
        try:
            tree, _ = target.verify(root, Proposal((first, second), (0, 0)))
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            raise DecodingError(
                f"this target does not take a 4-D attention mask ({type(error).__name__}: {error}); "
                "use a chain (tree=None)"
            ) from error
        wrong = (line[2] - branch[1]).abs().max()
        off = (tree[2] - branch[1]).abs().max()
    if not off < _MARGIN * wrong:
        raise DecodingError(
            f"this target does not honour a 4-D attention mask: sibling tokens change each other's "
            f"logits by {off:.3g} (a full line of them: {wrong:.3g}); use a chain (tree=None)"
        )


def _start(target: Target, prompt: list[int]) -> None:
    target.start(len(prompt) + 3)
    target.prefill(torch.tensor([prompt], device=target.device))
