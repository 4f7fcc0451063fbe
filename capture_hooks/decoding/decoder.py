"""The speculative decoder: prompt, then rounds of draft, verify, accept."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..capture import Anatomy, bind, find_anatomy
from ..errors import DecodingError
from ..heads.contract import DraftHead
from ..heads.drafting import Drafting, TreeShape
from . import probe
from .fit import check_head, check_layers, check_length
from .packed import PackedLinears
from .request import Request, collect, prepare, stop_at
from .run import Run
from .stats import DecodeStats, Round
from .target import Target


@dataclass(frozen=True, slots=True)
class Generation:
    """One generated answer.

    Attributes:
        sequences: [1, N+T] prompt and answer, as `model.generate` returns them.
        tokens: [T] the answer alone.
        stats: what decoding did.
    """

    sequences: Tensor
    tokens: Tensor
    stats: DecodeStats


class SpeculativeDecoder:
    """Decodes with a target model and a draft head; the output is the target's own.

    Greedy decoding yields the tokens of ``model.generate(do_sample=False)``; sampling follows the
    target's distribution exactly.  One sequence at a time; not safe for use from several threads.

    Args:
        model: the target, possibly wrapped.
        head: a head trained for it.
        draft_tokens: most tokens drafted per round of a chain; fewer near the end of the answer.
        tree: draft a dynamic tree of this shape instead of a chain.
        min_confidence: stop drafting where the head itself gives the draft so far less than this
            chance of acceptance; 0 drafts ``draft_tokens`` always.  Never changes the output's law.
        drafting: when sampling, draft the head's most probable tokens (``greedy``) or sample them
            (``sample``); a tree is always drafted greedily.
        kernels: ``packed`` verifies through weights repacked for a few rows on a CPU, where measured
            faster (twice the memory for weights); ``stock`` leaves every kernel as it is.  Decoders of one
            model share the copy when given the same `PackedLinears`.
        anatomy: the target's parts; None finds them through the installed plugins.

    Raises:
        DecodingError: where head and target do not fit, or the target cannot be served.
    """

    def __init__(
        self,
        model: Any,
        head: DraftHead,
        draft_tokens: int = 5,
        tree: TreeShape | None = None,
        *,
        min_confidence: float = 0.0,
        drafting: Literal["greedy", "sample"] = "sample",
        kernels: Literal["stock", "packed"] | PackedLinears = "stock",
        anatomy: Anatomy | None = None,
    ) -> None:
        if draft_tokens < 1:
            raise DecodingError(f"draft_tokens must be at least 1, not {draft_tokens}")
        if not 0 <= min_confidence < 1:
            raise DecodingError(f"min_confidence is a probability below 1, not {min_confidence}")
        self.model = model
        self.head = head
        self._drafting = Drafting(draft_tokens if tree is None else tree.depth, tree, min_confidence)
        self._sampled = drafting == "sample"
        anatomy = find_anatomy(model) if anatomy is None else anatomy
        check_layers(head, anatomy)
        capture = bind(model, head.spec, anatomy=anatomy)
        if kernels == "packed":
            kernels = PackedLinears(anatomy.model)
        self.target = Target(model, capture, kernels if isinstance(kernels, PackedLinears) else None)
        check_head(head, capture.anatomy, self.target.state_width())
        if tree is not None:
            probe.require_tree(self.target)

    @property
    def anatomy(self) -> Anatomy:
        """The target's parts."""
        return self.target.anatomy

    @property
    def longest_pass(self) -> int:
        """Most rows of a verification pass."""
        return 1 + self._drafting.size

    def settings(self) -> dict[str, Any]:
        """How this decoder drafts and verifies, as plain values."""
        shape = self._drafting.tree
        return {
            "draft_tokens": self._drafting.depth if shape is None else None,
            "tree": None if shape is None else dataclasses.asdict(shape),
            "min_confidence": self._drafting.min_confidence,
            "drafting": "sample" if self._sampled else "greedy",
            "kernels": "stock" if self.target.kernels is None else "packed",
        }

    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int | None = None,
        *,
        generator: torch.Generator | None = None,
        **arguments: Any,
    ) -> Generation:
        """Generate one answer to the prompt ids [N] or [1, N].

        ``arguments`` are those of `model.generate`: ``generation_config``, ``do_sample``, ``temperature``,
        ``eos_token_id``, ``stopping_criteria``, ``stop_strings`` with ``tokenizer``, and so on.

        Raises:
            DecodingError: for a request that cannot be served losslessly.
        """
        request = self.prepare(input_ids, max_new_tokens, **arguments)
        return self._finish(request, list(self.rounds(request, generator)))

    def stream(
        self,
        input_ids: Tensor,
        max_new_tokens: int | None = None,
        *,
        generator: torch.Generator | None = None,
        **arguments: Any,
    ) -> Iterator[Round]:
        """As `generate`, yielding each round when done; the first is the prompt's (nothing drafted)."""
        yield from self.rounds(self.prepare(input_ids, max_new_tokens, **arguments), generator)

    def custom_generate(
        self, *, streamer: Any = None, generator: torch.Generator | None = None, tokenizer: Any = None
    ) -> Callable[..., Any]:
        """A callable for ``model.generate(..., custom_generate=decoder.custom_generate())``.

        A streamer goes here, and for ``stop_strings=`` the tokenizer: `generate` hands its own ``streamer=``
        and ``tokenizer=`` on to no such callable, and refuses ``stop_strings`` in a generation config beside
        one (transformers 5.24, generation/utils.py); `SpeculativeDecoder.generate` takes them there.
        """

        def decode(
            model: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            synced_gpus: bool = False,
            stop_strings: Any = None,
            **model_kwargs: Any,
        ) -> Any:
            if stop_strings:
                stopping_criteria = [*stopping_criteria, stop_at(stop_strings, tokenizer)]
            if model is not self.model and model is not self.anatomy.model:
                raise DecodingError(
                    f"this decoder decodes another model than the {type(model).__name__} whose generate was "
                    "called; make a SpeculativeDecoder for it, with a head of its own"
                )
            request = collect(
                model,
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus,
                **model_kwargs,
            )
            if streamer is not None:
                streamer.put(input_ids.cpu())
            rounds = []
            for step in self.rounds(request, generator):
                rounds.append(step)
                if streamer is not None:
                    for token in step.tokens:
                        streamer.put(torch.tensor([token]))
            if streamer is not None:
                streamer.end()
            result = self._finish(request, rounds)
            if not request.return_dict:
                return result.sequences
            from transformers.generation.utils import GenerateDecoderOnlyOutput

            return GenerateDecoderOnlyOutput(sequences=result.sequences)  # type: ignore[arg-type]  # it is int64

        return decode

    def prepare(self, input_ids: Tensor, max_new_tokens: int | None = None, **arguments: Any) -> Request:
        """Resolve a request once, to be decoded with `rounds` any number of times.

        Raises:
            DecodingError: for a request that cannot be served losslessly.
        """
        ids = input_ids[None] if input_ids.ndim == 1 else input_ids
        if ids.shape[-1] == 0:
            raise DecodingError("the prompt is empty: give at least one token")
        if max_new_tokens is not None:
            arguments["max_new_tokens"] = max_new_tokens
        return prepare(self.model, ids, **arguments)

    def rounds(self, request: Request, generator: torch.Generator | None = None) -> Iterator[Round]:
        """Decode a prepared request; the first round is the prompt's.

        Raises:
            DecodingError: for a prompt and answer longer than the target's context, or a target whose class
                drops what it has read on the way.
        """
        check_length(request, self.target.anatomy)
        self.target.require_continuation(request.input_ids.shape[1], request.max_length)
        drafting = dataclasses.replace(self._drafting, generator=generator)
        if request.choice.sample and self._sampled and drafting.tree is None:
            drafting = dataclasses.replace(drafting, warp=request.choice.warp)
        run = Run(self.target, self.head, drafting, request)
        # Each step enters and leaves inference mode itself: a generator must not leave it on for its caller.
        yield run.prompt()
        while not run.finished:
            yield run.round()

    def _finish(self, request: Request, rounds: list[Round]) -> Generation:
        tokens = torch.tensor(
            [t for r in rounds for t in r.tokens], dtype=torch.long, device=request.input_ids.device
        )
        stats = DecodeStats.of(rounds[1:], prefill_seconds=rounds[0].verify_seconds)
        return Generation(torch.cat([request.input_ids[0], tokens])[None], tokens, stats)
