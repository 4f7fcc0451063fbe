"""The speculative decoder: prompt, then rounds of draft, verify, accept; and which drafts are accepted."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..capture import Anatomy, bind, find_anatomy
from ..errors import DecodingError
from ..heads.contract import DraftHead
from ..heads.drafting import Drafting, Proposal, TreeShape
from ..target import context_length
from .packed import PackedLinears
from .request import Request, collect, prepare, stop_at
from .stats import DecodeStats, Round
from .target import Target, require_tree


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
            require_tree(self.target)

    @property
    def anatomy(self) -> Anatomy:
        """The parts of the target model, as capture found them."""
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


class Run:
    """One generation: the prompt's pass, then rounds of draft, verify, accept."""

    def __init__(self, target: Target, head: DraftHead, drafting: Drafting, request: Request) -> None:
        self._target = target
        self._head = head
        self._drafting = drafting
        self._request = request
        self._drafter = head.drafter(request.max_length, drafting)
        self._ids: list[int] = request.input_ids[0].tolist()
        # What the head has not been told yet: captured states, and the tokens after them.
        self._pending: tuple[list[Tensor], list[int]] = ([], [])
        self.finished = False

    @torch.inference_mode()
    def prompt(self) -> Round:
        """Prefill; gives the first token."""
        start = time.perf_counter()
        ids = self._request.input_ids.to(self._target.device)
        self._target.start(self._request.max_length, self._request.inputs)
        logits, states = self._target.prefill(ids)
        choice = self._request.choice
        token = int(choice.pick(choice.scores(logits, [ids]), self._drafting.generator)[0])
        self._pending = ([states], [*self._ids[1:], token])
        tokens = self._append([token])
        return Round(tokens, 0, 0, 0, verify_seconds=time.perf_counter() - start)

    @torch.inference_mode()
    def round(self) -> Round:
        """One round: draft tokens, verify them in one pass of the target, accept the right ones."""
        start = time.perf_counter()
        proposal = self._propose()
        drafted = time.perf_counter()
        logits, states = self._target.verify(self._ids[-1], proposal)
        accepted, last = self._accept(proposal, logits)
        verified = time.perf_counter()
        self._target.commit(proposal, accepted)
        gained = [proposal.tokens[node - 1] for node in accepted] + [last]
        rows = states if proposal.is_chain else states[torch.tensor([0, *accepted], device=states.device)]
        self._pending[0].append(rows[: len(gained)])
        self._pending[1].extend(gained)
        tokens = self._append(gained)
        depth = max(proposal.depths())
        end = time.perf_counter()
        return Round(
            tokens,
            len(proposal.tokens),
            depth,
            len(accepted),
            drafted - start,
            verified - drafted,
            end - verified,
        )

    def _propose(self) -> Proposal:
        depth = self._request.max_length - len(self._ids) - 1  # a round gains one token more than it drafts
        shape = self._drafting.tree
        depth = self._target.room(min(depth, self._drafting.depth), None if shape is None else shape.size)
        if depth < 1:
            return Proposal((), ())
        # Rows are handed over only when they are needed: the last round's never are.
        states, following = torch.cat(self._pending[0]), self._pending[1]
        self._pending = ([], [])
        # The states lie where the target's last layer is; the head may live elsewhere.
        device = self._head.draft_token_ids.device
        self._drafter.accept(states.to(device), torch.tensor(following, device=device))
        proposal = self._drafter.propose(depth)
        if len(proposal.tokens) > self._drafting.size or max(proposal.depths()) > depth:
            raise DecodingError(
                f"the head {self._head.name!r} proposed {len(proposal.tokens)} tokens on paths of up to "
                f"{max(proposal.depths())}, and was asked for {self._drafting.size} on paths of up to {depth}"
            )
        if proposal.probabilities is not None and self._drafting.warp is None:
            raise DecodingError(
                f"the head {self._head.name!r} sampled its tokens, and was asked for the most probable ones"
            )
        return proposal

    def _accept(self, proposal: Proposal, logits: Tensor) -> tuple[list[int], int]:
        choice, generator = self._request.choice, self._drafting.generator
        prefixes: list[Tensor] = []
        if choice.needs_prefixes:
            for node in range(len(proposal.tokens) + 1):
                path = [proposal.tokens[n - 1] for n in proposal.path(node)]
                prefixes.append(torch.tensor([self._ids + path], device=logits.device))
        scores = choice.scores(logits, prefixes)
        if proposal.probabilities is None:
            return walk(proposal, choice.pick(scores, generator).tolist())
        vocabulary = self._head.draft_token_ids.to(logits.device)
        return reject(proposal, choice.probabilities(scores), vocabulary, generator)

    def _append(self, gained: list[int]) -> tuple[int, ...]:
        """Add tokens up to the first one that ends the answer."""
        request = self._request
        kept: list[int] = []
        for token in gained:
            self._ids.append(token)
            kept.append(token)
            if token in request.eos or len(self._ids) >= request.max_length or self._stopped():
                self.finished = True
                break
        return tuple(kept)

    def _stopped(self) -> bool:
        request = self._request
        return bool(request.criteria) and request.stopped(
            torch.tensor([self._ids], device=self._target.device)
        )


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
    generator = torch.Generator(device=ids.device)  # the global random state stays as it was
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


def walk(proposal: Proposal, choices: Sequence[int]) -> tuple[list[int], int]:
    """Follow the target's choices through a deterministic draft.

    It needs no rejection test: at every node the token is drawn that the target would emit (arg-max, or one
    sample of its distribution), and one goes on while it is among the drafted children.  For a point-mass
    draft this is the same law as accepting x with probability p(x) and else sampling from p without x
    (arXiv 2211.17192 with q a point mass; several children: arXiv 2305.09781).

    Args:
        proposal: the drafted tree.
        choices: the target's token after each of nodes 0..M.

    Returns:
        Accepted nodes from the root down, and the token the target adds after them.
    """
    children = {
        (parent, token): node
        for node, (token, parent) in enumerate(zip(proposal.tokens, proposal.parents, strict=True), start=1)
    }
    accepted: list[int] = []
    node = 0
    while (child := children.get((node, choices[node]))) is not None:
        accepted.append(child)
        node = child
    return accepted, choices[node]


def reject(
    proposal: Proposal, target: Tensor, draft_ids: Tensor, generator: torch.Generator | None = None
) -> tuple[list[int], int]:
    """The rejection rule of arXiv 2211.17192 for a sampled chain, with its full distributions.

    Args:
        proposal: a chain with ``probabilities`` [M, D].
        target: the target's distributions [M+1, V] after nodes 0..M.
        draft_ids: [D] target ids of the draft vocabulary.
        generator: source of randomness.

    Returns:
        As `walk`.
    """
    assert proposal.probabilities is not None
    drawn_from = proposal.probabilities.to(target)
    uniform = torch.rand(len(proposal.tokens), generator=generator, device=target.device)
    for at, token in enumerate(proposal.tokens):
        # q is laid out over the full vocabulary: outside the draft vocabulary it is zero.
        q = torch.zeros_like(target[at]).index_copy_(0, draft_ids, drawn_from[at])
        p = target[at]
        if uniform[at] * q[token] < p[token]:
            continue
        residual = (p - q).clamp_(min=0)
        total = residual.sum()
        # Only rounding can leave nothing: p == q everywhere, where a rejection has probability zero.
        weights = residual if total > 0 else p
        return list(range(1, at + 1)), int(torch.multinomial(weights, 1, generator=generator).item())
    bonus = torch.multinomial(target[len(proposal.tokens)], 1, generator=generator)
    return list(range(1, len(proposal.tokens) + 1)), int(bonus.item())
