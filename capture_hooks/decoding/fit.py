"""Do head, target and request fit together?  Asked before anything is decoded."""

from __future__ import annotations

import torch

from ..capture import Anatomy
from ..errors import DecodingError
from ..heads.contract import DraftHead
from ..heads.drafting import Drafting
from ..target import context_length
from .request import Request


def check_layers(head: DraftHead, anatomy: Anatomy) -> None:
    """Make sure that the head was made for a target of this depth.

    Raises:
        DecodingError: with both numbers of layers.
    """
    if head.target_layers != anatomy.n_layers:
        raise DecodingError(
            f"the head was made for a target of {head.target_layers} layers, "
            f"this model has {anatomy.n_layers}"
        )


def check_head(head: DraftHead, anatomy: Anatomy, width: int) -> None:
    """Show the head one row of ``width`` captured values and the target's last token id.

    Raises:
        DecodingError: naming what of head and target disagrees.
    """
    ids = head.draft_token_ids
    if int(ids.max()) >= anatomy.vocab_size:
        raise DecodingError(
            f"the head drafts token id {int(ids.max())}, outside this target's vocabulary of "
            f"{anatomy.vocab_size}"
        )
    weight = anatomy.embedding.weight
    assert isinstance(weight, torch.Tensor)
    generator = torch.Generator(device=ids.device)  # its own: nobody's random numbers move
    drafting = Drafting(1, warp=_first, generator=generator)
    with torch.inference_mode():
        states = torch.zeros(1, width, dtype=weight.dtype, device=ids.device)
        last = torch.tensor([anatomy.vocab_size - 1], device=ids.device)
        try:
            drafter = head.drafter(1, drafting)
            drafter.accept(states, last)
            drawn_from = drafter.propose(1).probabilities
        except (RuntimeError, IndexError) as error:
            raise DecodingError(
                f"the head cannot take this target's states ({len(head.spec)} points, {width} values a row, "
                f"{anatomy.hidden_size} wide) and token ids up to {anatomy.vocab_size - 1}: {error}"
            ) from error
    if drawn_from is not None and drawn_from.shape[-1] != len(ids):
        raise DecodingError(
            f"the head gives {drawn_from.shape[-1]} logits a row but names {len(ids)} draft tokens"
        )


def _first(logits: torch.Tensor) -> torch.Tensor:
    """All probability on the first draft token."""
    return torch.zeros_like(logits).index_fill_(-1, torch.tensor(0, device=logits.device), 1.0)


def check_length(request: Request, anatomy: Anatomy) -> None:
    """Make sure that prompt and answer fit the target's context.

    Raises:
        DecodingError: with both lengths.
    """
    context = context_length(anatomy.model)
    prompt, longest = request.input_ids.shape[1], request.max_length
    if longest <= prompt:
        raise DecodingError(f"max_length {longest} leaves no room after a prompt of {prompt} tokens")
    if context is not None and longest > context:
        advice = (
            "shorten the prompt" if prompt >= context else f"ask for at most {context - prompt} new tokens"
        )
        raise DecodingError(
            f"a prompt of {prompt} tokens and up to {longest - prompt} new ones exceed the target's context "
            f"of {context}: {advice}"
        )
