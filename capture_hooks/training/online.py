"""States captured while training: the target reads each batch just before the head does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..capture import LengthRule, bind
from ..capture.anatomy import Anatomy
from ..spec import CaptureSpec
from ..store import Example
from ..target.states import TRIAL_TOKENS, check_causal, evaluating, run_with_images, states_of

#: Sequences run together are padded to the longest; the shortest is at least this share of it.
_ALIKE: Final = 0.75


class LiveCapture:
    """Adds ``states`` and ``target`` to a packed batch of tokens; nothing is written to disk.

    Sequences of like length go through the target together, padded on the right, where the model computes
    them as if each were alone; a piece cut from a longer sequence is run with all that precedes it, as a
    dump's states were.  A sequence with images is run alone and whole, as for a dump.
    """

    def __init__(self, model: nn.Module, spec: CaptureSpec, anatomy: Anatomy) -> None:
        self.model = model
        self._session = bind(model, spec, target=True, anatomy=anatomy)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The batch of `pack` over `LiveSequences`, with states [N, K*H] and target [N, H].

        Raises:
            CaptureError: for a state that is NaN or infinite.
        """
        device = batch["token_ids"].device
        before = torch.split(batch["context"], batch["context_length"].tolist())
        pieces = torch.split(batch["token_ids"], batch["starts"].diff().tolist())
        whole = [torch.cat(parts) for parts in zip(before, pieces, strict=True)]
        media = batch["media"]
        found: list[tuple[Tensor, Tensor]] = [(torch.empty(0), torch.empty(0))] * len(whole)
        for index, inputs in enumerate(media):
            if inputs is not None:
                found[index] = self._run_with_images(inputs)
        text = [i for i, inputs in enumerate(media) if inputs is None]
        for group in grouped([len(whole[i]) for i in text], self._session.anatomy.lengths):
            chosen = [text[i] for i in group]
            for index, rows in zip(chosen, self._run([whole[i] for i in chosen]), strict=True):
                found[index] = rows
        states, target = [], []
        for ids, first, (inputs, wanted) in zip(pieces, map(len, before), found, strict=True):
            # Behind them: an image sequence's later tokens, padding where a decoder sees no mask (RWKV).
            last = first + len(ids)
            states.append(inputs[first:last].to(device))
            target.append(wanted[first:last].to(device))
        return {
            "states": torch.cat(states),
            "target": torch.cat(target),
            "token_ids": batch["token_ids"],
            "loss_mask": batch["loss_mask"],
            "starts": batch["starts"],
        }

    def check(self, examples: Sequence[Example]) -> None:
        """Whether the target looks back only, over the first sequence of text and the first with images.

        Raises:
            ModelError: it does not.
        """
        text = next((example for example in examples if example.media is None), None)
        seen = next((example for example in examples if example.media is not None), None)
        if text is not None:
            tokens = text.token_ids[:TRIAL_TOKENS]
            check_causal(self.model, lambda ids: self._run([ids])[0][0], tokens, len(tokens) - 1)
        if seen is not None and seen.media is not None:
            inputs = seen.media.inputs()
            run = self._run_with_images
            check_causal(
                self.model,
                lambda ids: run({**inputs, "input_ids": ids[None]})[0],
                seen.token_ids,
                seen.last_learnt,
            )

    def _run(self, sequences: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """States [T, K*H] and target [T, H] of each sequence, from one forward."""
        return [(one.packed, one.target) for one in states_of(self._session, sequences)]

    @torch.no_grad()
    def _run_with_images(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """As `_run`, of one sequence with what its images are to the model (`Media.inputs`)."""
        self._session.anatomy.lengths.forget()
        with evaluating(self.model), self._session as capture:
            run_with_images(self.model, inputs, next(self.model.parameters()).device)
        captured = capture.states
        captured.check_finite()
        return captured.packed, captured.target


def grouped(lengths: Sequence[int], rule: LengthRule) -> list[list[int]]:
    """Divide numbers 0..S-1 into groups of like length that may share a forward, longest first."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        longest = lengths[groups[-1][0]] if groups else 0
        if not groups or lengths[index] < _ALIKE * longest or not rule.alike(lengths[index], longest):
            groups.append([])
        groups[-1].append(index)
    return groups
