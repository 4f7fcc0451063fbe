"""Held-out sequences, chosen by prompt, and the draft vocabulary, chosen by frequency."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import TrainingError
from .data import Sequences


@dataclass(frozen=True, slots=True)
class Split:
    """Numbers of the sequences to train on and of those held out."""

    train: tuple[int, ...]
    held_out: tuple[int, ...]


def prompt_key(token_ids: Tensor, loss_mask: Tensor) -> bytes:
    """Identifies the prompt: the tokens before the first supervised one.

    A sequence with fewer than two such tokens (plain text) has no prompt; all its tokens stand for it.
    """
    supervised = loss_mask.nonzero()
    first = int(supervised[0]) if len(supervised) else len(token_ids)
    prompt = token_ids[:first] if first >= 2 else token_ids
    return hashlib.sha256(prompt.to(torch.int64).cpu().numpy().tobytes()).digest()


def split_by_prompt(sequences: Sequences, share: float) -> Split:
    """Hold out about ``share`` of the prompts; sequences with one prompt are all on one side.

    The turns of one conversation are several sequences where each is learnt by itself: later prompts contain
    earlier answers, so all go where the first one goes.

    A prompt's side depends on its own tokens alone: neither a seed nor further data moves it, so a head
    trained further on a grown data set is never evaluated on what it has learnt.  Where chance leaves
    no prompt out, the one nearest the line is.

    Raises:
        TrainingError: when there are fewer than two different prompts to divide.
    """
    everything = tuple(range(len(sequences)))
    if share == 0:
        return Split(everything, ())
    keys = [prompt_key(*sequences.tokens(sequences.first_of_conversation(index))) for index in everything]
    if len(set(keys)) < 2:
        raise TrainingError(
            f"cannot hold out {share:.0%}: all {len(keys)} sequences have the same prompt. "
            "Give evaluation data of its own, or hold out 0"
        )
    line = max(int(share * 2**64).to_bytes(8, "big"), min(keys)[:8])
    held = tuple(i for i in everything if keys[i][:8] <= line)
    train = tuple(i for i in everything if keys[i][:8] > line)
    if not train:
        raise TrainingError(
            f"holding out {share:.0%} of {len(set(keys))} prompts leaves none to train on; hold out less"
        )
    return Split(train, held)


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The target ids a head can draft.

    Attributes:
        token_ids: [D] int64, ascending.
        coverage: share of the supervised tokens (those counted) that lie inside.
    """

    token_ids: Tensor
    coverage: float


def token_counts(sequences: Sequences, chosen: tuple[int, ...], vocab_size: int) -> Tensor:
    """[V] int64: how often each token is one to be learnt.

    Raises:
        TrainingError: for a token id outside the target's vocabulary.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for index in chosen:
        ids, mask = sequences.tokens(index)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
            raise TrainingError(
                f"sequence {index} holds token ids from {int(ids.min())} to {int(ids.max())}, but the "
                f"target's vocabulary has {vocab_size} tokens; this data was made with another tokenizer"
            )
        counts += torch.bincount(ids[mask], minlength=vocab_size)
    return counts


def coverage(counts: Tensor, token_ids: Tensor) -> float:
    """Share of the counted tokens that lie in ``token_ids``."""
    return float(counts[token_ids].sum() / counts.sum().clamp(min=1))


def choose_draft_vocabulary(counts: Tensor, size: int | None) -> DraftVocabulary:
    """The ``size`` most frequent tokens, the lower id first among equals; None takes them all.

    Raises:
        TrainingError: for a size larger than the target's vocabulary.
    """
    vocab_size = len(counts)
    if size is None:
        size = vocab_size
    if size > vocab_size:
        raise TrainingError(
            f"a draft vocabulary of {size} tokens is larger than the target's own {vocab_size}; ask for less"
        )
    chosen = torch.sort(counts, descending=True, stable=True).indices[:size].sort().values
    return DraftVocabulary(chosen, coverage(counts, chosen))
