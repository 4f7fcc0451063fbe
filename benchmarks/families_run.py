"""A small model against itself: `generate`'s tokens by speculative decoding, each row's states in a batch.

Every run crosses the lengths at which a model computes otherwise: the windows and limits its config names.
Each comparison is with a copy of the model that nothing has run on yet, since a model may remember
(a dynamic RoPE keeps the frequencies of the longest sequence it has seen).
"""

from __future__ import annotations

import copy
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capture_hooks.capture import bind
from capture_hooks.capture.anatomy import Anatomy
from capture_hooks.decoding import SpeculativeDecoder
from capture_hooks.decoding.evaluation import compare
from capture_hooks.errors import CaptureHooksError
from capture_hooks.heads.contract import DraftHead, StepSums, TrainBatch
from capture_hooks.heads.drafting import Drafting, StepwiseDrafter
from capture_hooks.spec import CaptureSpec
from capture_hooks.store import Dump, ModelStates, write_dump
from capture_hooks.store.data import Example, Examples
from capture_hooks.training.online import LiveCapture

#: Tokens of prompt and of answer: windows of 8 and limits of 24 are crossed by one, the other, or both.
DECODED = ((5, 30), (20, 24), (40, 12))
#: Lengths of sequences that share batches.
RAGGED = (3, 9, 12, 17, 21, 24, 25, 26, 31, 33, 40, 47)
#: Drafted tokens, and the chance of each to be right.
DRAFTED, RIGHT = 4, 0.7
#: Most that the number of rows in a pass may change a logit by rounding.
NOISE = 1e-3
SPEC = "embed, post.1, post.-1"


class ScriptHead(DraftHead):
    """Drafts a known answer, with mistakes."""

    name = "script"

    def __init__(self, anatomy: Anatomy) -> None:
        super().__init__()
        self.spec = CaptureSpec.parse(SPEC).absolute(anatomy.n_layers)
        self.target_layers = anatomy.n_layers
        self._ids = torch.arange(anatomy.vocab_size)
        self.script: list[int] = []  # token i + 1 is what row i drafts
        self._dice = random.Random(0)

    def forward(self, batch: TrainBatch) -> StepSums:
        raise NotImplementedError

    def new_cache(self, max_length: int) -> Any:
        return None

    def extend(self, cache: Any, states: Tensor, next_ids: Tensor, start: int) -> Tensor:
        return torch.arange(start, start + len(next_ids), dtype=torch.float)[:, None]

    def step(
        self, cache: Any, hidden: Tensor, ids: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return hidden + 1

    def logits(self, hidden: Tensor) -> Tensor:
        scores = torch.zeros(len(hidden), len(self._ids))
        for row, at in enumerate(hidden[:, 0].long().tolist()):
            following = self.script[at + 2] if at + 2 < len(self.script) else 3
            wrong = self._dice.random() > RIGHT
            scores[row, (following + wrong) % len(self._ids)] = 9.0
        return scores

    def drafter(self, max_length: int, drafting: Drafting) -> StepwiseDrafter:
        return StepwiseDrafter(self, max_length, drafting)

    @property
    def draft_token_ids(self) -> Tensor:
        return self._ids

    def export(self, order: Any) -> Any:
        raise NotImplementedError


def decodes(model: Any, anatomy: Anatomy, fresh: Any) -> tuple[str, str]:
    """Verdict and detail of greedy decoding against `model.generate` of ``fresh``, the same model unused."""
    vocabulary = anatomy.vocab_size
    excused = []
    try:
        head = ScriptHead(anatomy)
        decoder = SpeculativeDecoder(model, head, DRAFTED, anatomy=anatomy)
        accepted = drafted = 0
        for prompt_length, new in DECODED:
            generator = torch.Generator().manual_seed(prompt_length)
            ids = torch.randint(3, vocabulary - 1, (1, prompt_length), generator=generator)
            # The penalty keeps a random model from saying one token for ever.
            arguments = {
                "do_sample": False,
                "max_new_tokens": new,
                "eos_token_id": None,
                "pad_token_id": 0,
                "repetition_penalty": 1.5,
            }
            try:
                reference = copy.deepcopy(fresh).generate(
                    ids, attention_mask=torch.ones_like(ids), **arguments
                )
            except Exception as error:
                return "not run", f"generate: {type(error).__name__}: {error}"
            head.script = reference[0].tolist()
            result = decoder.generate(ids, **arguments)
            accepted += sum(result.stats.accepted)
            drafted += result.stats.drafted
            parted = compare(decoder.target, ids[0], result.tokens, reference[0, prompt_length:], DRAFTED + 1)
            if parted is not None and not (parted.excused and parted.noise < NOISE):
                return "WRONG", f"prompt {prompt_length} + {new}: {parted}"
            if parted is not None:
                excused.append(str(parted))
    except CaptureHooksError as error:
        return "refused", str(error)
    except Exception as error:
        return "CRASH", f"{type(error).__name__}: {error}"
    detail = f"{accepted}/{drafted} drafts accepted" + "".join(f"; {text}" for text in excused)
    return "ok", detail


def dumps(model: Any, anatomy: Anatomy, fresh: Any) -> tuple[str, str]:
    """Verdict and detail of ragged batches, dumped and captured while training, against each sequence alone.

    ``fresh`` is the same model unused, which runs the sequences alone.
    """
    spec = CaptureSpec.parse(SPEC + (" -> post.-1" if anatomy.final_norm is None else ""))
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(3, anatomy.vocab_size - 1, (n,), generator=generator) for n in RAGGED]
    examples = Examples(
        "made", tuple(Example(s, torch.ones(len(s), dtype=torch.bool), "made") for s in sequences)
    )
    alone = []
    for sequence in sequences:
        one = copy.deepcopy(fresh)
        try:
            with torch.no_grad(), bind(one, spec) as capture:
                one(input_ids=sequence[None], use_cache=False)
        except CaptureHooksError as error:
            return "refused", f"{len(sequence)} tokens alone: {error}"
        alone.append(capture.states.packed)
    size = max(float(states.abs().max()) for states in alone)
    verdicts = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_dump(ModelStates(model, spec, examples), Path(folder) / "dump")
            dump = Dump.open(Path(folder) / "dump")
            off = max(float((dump[i].states - states).abs().max()) for i, states in enumerate(alone))
        verdicts.append(("WRONG" if not off <= 1e-4 * size else "ok", f"dump off by {off:.2g} of {size:.2g}"))
    except CaptureHooksError as error:
        verdicts.append(("refused", f"dump: {error}"))
    except Exception as error:
        verdicts.append(("CRASH", f"dump: {type(error).__name__}: {error}"))
    try:
        live = LiveCapture(model, spec, anatomy)
        empty = torch.zeros(0, dtype=torch.long)
        batch = live(
            {
                "token_ids": torch.cat(sequences),
                "loss_mask": torch.ones(sum(RAGGED), dtype=torch.bool),
                "starts": torch.tensor([0, *RAGGED]).cumsum(0),
                "context": empty,
                "context_length": torch.zeros(len(RAGGED), dtype=torch.long),
                "media": [None] * len(RAGGED),
            }
        )
        off = float((batch["states"] - torch.cat(alone)).abs().max())
        verdicts.append(("WRONG" if not off <= 1e-4 * size else "ok", f"live off by {off:.2g}"))
    except CaptureHooksError as error:
        verdicts.append(("refused", f"live: {error}"))
    except Exception as error:
        verdicts.append(("CRASH", f"live: {type(error).__name__}: {error}"))
    worst = min(verdicts, key=lambda v: ("CRASH", "WRONG", "refused", "ok").index(v[0]))[0]
    return worst, "; ".join(text for _, text in verdicts)
