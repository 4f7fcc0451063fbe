"""Which token of which request each captured row is: read from the arguments of every forward.

A forward of the decoder runs over a batch of B sequences of T tokens.  Forwards on one KV cache
continue the same requests; one without a cache, or on an empty one, begins B new requests.  A
cache that has become shorter in between was rolled back (rejected drafts): the rows beyond it are dropped.
Beam search moves sequences between rows of the cache, which would mix a capture up.  So while a session
follows a cache, that cache object (never its class) carries a ``reorder_cache`` that refuses.

Engines that pack the requests of a batch into one axis tell the rows themselves (`Anatomy.rows`).
"""

from __future__ import annotations

import types
import weakref
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import CaptureError
from .anatomy import BatchRows, RowReader
from .layouts import positional_names

#: Keyword names under which libraries pass a KV cache or recurrent state.
CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "cache_params", "layer_past")
_NO_ARGUMENTS: dict[str, Any] = {}


def is_cache(value: Any) -> bool:
    """Whether a forward argument or output is a cache object."""
    return hasattr(value, "get_seq_length")


@dataclass(slots=True)
class Group:
    """Requests that share one batch and one cache.

    Attributes:
        batch: how many there are.
        length: columns (tokens, padding included) seen so far.
        base: tokens of each request that lay in the cache before the session saw it: [B] or one number.
        first: number of the first request, given when rows are first read.
    """

    batch: int
    length: int
    base: Tensor | int
    first: int | None = None


@dataclass
class Forward:
    """One forward: whose rows it gives, and the memory its states are in.

    Attributes:
        lead: shape of its token grid, ``[B, T]`` or ``[T]``.
        grid: shape of its rows in memory: ``lead``, or ``[n]`` where padding was dropped.
        start: column of its first token.
        kept: [n] int64 indices of the real tokens in the flattened grid; None when all are.
        padding: [B, T] bool mask of real tokens that is only to be looked at afterwards, or None.
        group: its requests, where they are shared with other forwards (by a cache).
        void_from: the column from which the group's earlier rows are void, or None.
        told: its rows as the engine tells them, or None.
        packed: ``[*grid, W]``; None while some width is unknown.
        target: ``[*grid, H]`` where the target is not one of the inputs.
        loose: by tap, states [n, width] that wait in a tensor of their own.
    """

    lead: torch.Size
    grid: tuple[int, ...]
    start: int
    # Not set by __init__: one of these is made in every forward, and most keep their defaults.
    kept: Tensor | None = field(init=False, default=None)
    padding: Tensor | None = field(init=False, default=None)
    group: Group | None = field(init=False, default=None)
    void_from: int | None = field(init=False, default=None)
    told: BatchRows | None = field(init=False, default=None)
    packed: Tensor | None = field(init=False, default=None)
    target: Tensor | None = field(init=False, default=None)
    loose: dict[int, Tensor] | None = field(init=False, default=None)

    @property
    def batch(self) -> int:
        return self.lead[0] if len(self.lead) == 2 else 1

    @property
    def length(self) -> int:
        return self.lead[-1]

    @property
    def decode(self) -> bool:
        """Whether it is one token per request behind others."""
        return self.length == 1 and self.start > 0 and len(self.lead) == 2

    @property
    def rows(self) -> int:
        return self.lead.numel() if self.kept is None else self.kept.shape[0]


class Requests:
    """Follows the requests of one session over its calls."""

    def __init__(self, root: nn.Module, *, static: bool, reader: RowReader | None = None) -> None:
        """``static``: look at no tensor's values during a forward (the buffer may be part of a graph)."""
        self._names = positional_names(root)
        self._static = static
        self._reader = reader
        self._told: BatchRows | None = None
        self._groups: dict[int, tuple[weakref.ref[Any], Group]] = {}
        self._arguments: dict[str, Any] = _NO_ARGUMENTS
        self._past = 0
        self._group: Group | None = None
        #: The cache passed to the forward that is running.
        self.cache: Any = None

    def forget(self) -> None:
        """Start anew: whatever comes next belongs to new requests."""
        self._groups.clear()
        self.abandon()

    def abandon(self) -> None:
        """Let go of a forward that is over."""
        self._arguments = _NO_ARGUMENTS
        self.cache = self._group = None
        self._past = 0

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at a forward's arguments, before its cache grows.

        Raises:
            CaptureError: a cache that holds tokens this session should have seen but did not, or rows that
                the engine cannot tell (with a static buffer only on reading them).
        """
        if self._reader is not None:
            self._told = told = self._reader(args, kwargs)
            if told.unknown is not None and not self._static:
                raise CaptureError(untold(told))
            return
        if self.cache is not None:
            self.abandon()  # the forward before this one failed
        if args:
            kwargs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        self._arguments = kwargs
        if len(kwargs) > 1:  # more than token ids alone
            for name in CACHE_NAMES:
                if (cache := kwargs.get(name)) is not None:
                    self._open(cache)
                    return

    def forward(self, state: Tensor) -> Forward:
        """The rows of the forward that is running; ``state`` is the first state captured in it.

        Raises:
            CaptureError: a mask that cannot be read, or another batch size than the cache's requests have.
        """
        if self._told is not None:
            return self._packed_forward(self._told, state)
        arguments = self._arguments
        grid = arguments.get("input_ids")
        if grid is not None:
            lead = grid.shape
        else:
            embeds = arguments.get("inputs_embeds")
            lead = (state if embeds is None else embeds).shape[:-1]
        forward = Forward(lead, lead, self._past)
        if self._group is not None and self._group.batch != forward.batch:
            raise CaptureError(
                f"a forward of {forward.batch} sequences continues a cache of {self._group.batch}: the batch "
                "was expanded, selected or beam-searched in between, so rows can no longer be told apart; "
                "capture with num_beams=1 and an unchanged batch"
            )
        if (mask := arguments.get("attention_mask")) is not None:
            self._drop_padding(forward, mask)
        return forward

    def finish(self, forward: Forward, output: Any) -> None:
        """Book a completed forward: which requests it belongs to, and what it rolled back."""
        if forward.told is not None:
            return
        cache, group = self.cache, self._group
        if cache is None and type(output) is not Tensor:
            cache = _returned_cache(output)
        if cache is not None:
            if group is None:
                group = Group(forward.batch, forward.start, self._tokens_before(forward))
                self._groups[id(cache)] = (weakref.ref(cache), group)
            elif forward.start < group.length:
                forward.void_from = forward.start
            group.length = forward.start + forward.length
            forward.group = group
        self.abandon()

    def caches(self) -> list[Any]:
        """The caches followed that are still alive."""
        return [cache for ref, _ in self._groups.values() if (cache := ref()) is not None]

    def _packed_forward(self, told: BatchRows, state: Tensor) -> Forward:
        """A forward over one axis of rows; those behind the last request are padding."""
        forward = Forward(state.shape[:-1], state.shape[:-1], 0)
        forward.told = told
        if told.unknown is not None:
            return forward
        here, rows = forward.lead.numel(), sum(told.lengths)
        if rows > here:
            raise CaptureError(
                f"a forward of {len(told.requests)} requests with {rows} tokens gave states of {here} rows: "
                f"{list(state.shape)}; each rank sees part of the tokens, which cannot be captured"
            )
        if rows < here and self._static:
            forward.padding = torch.arange(here) < rows
        elif rows < here:
            forward.kept, forward.grid = torch.arange(rows), (rows,)
        return forward

    def _open(self, cache: Any) -> None:
        if not is_cache(cache):
            raise CaptureError(
                f"cannot follow a KV cache of type {type(cache).__name__}: it does not tell its length "
                "(get_seq_length); pass one of transformers' Cache classes, or use_cache=False"
            )
        self.cache = cache
        known = self._groups.get(id(cache))
        group = known[1] if known is not None and known[0]() is cache else None
        past = self._length(cache, group)
        if group is not None and past == 0:
            group = None  # it was reset: new requests
        if group is not None and past > group.length:
            raise CaptureError(
                f"the KV cache holds {past} tokens but this session saw {group.length} of them: "
                "some forwards ran outside it (before it was entered again, or below the decoder)"
            )
        self._group, self._past = group, past

    def _length(self, cache: Any, group: Group | None) -> int:
        try:
            length = cache.get_seq_length()
        except ValueError:  # recurrent layers only: nothing counts tokens
            if group is not None:
                return group.length
            if cache.has_previous_state():
                raise CaptureError(
                    f"a {type(cache).__name__} of recurrent layers holds tokens and cannot tell how many; "
                    "enter the session before the first forward on it"
                ) from None
            return 0
        if isinstance(length, Tensor):
            if self._static:
                return 0 if group is None else group.length
            return int(length)
        return int(length)

    def _drop_padding(self, forward: Forward, mask: Any) -> None:
        real = self._real(forward, mask)
        if real is not None and self._static:
            forward.padding = real
        elif real is not None:
            kept = real.reshape(-1).nonzero().flatten()
            if kept.shape[0] != forward.lead.numel():
                forward.kept, forward.grid = kept, (kept.shape[0],)

    def _real(self, forward: Forward, mask: Any) -> Tensor | None:
        """[B, T] bool: which tokens are not padding; None when the mask says nothing."""
        if isinstance(mask, dict):  # one mask per kind of attention; padding is the same in all
            mask = next((m for m in mask.values() if m is not None), None)
        if mask is None:
            return None
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] >= forward.length:
            return mask[:, -forward.length :].bool().expand(forward.batch, -1)
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[-1] >= forward.length:
            # A real token sees itself; a padded one is masked out as a key.  Its key stands at its column,
            # or, where a sliding window has dropped the first keys, among the last ones.
            first = min(forward.start, mask.shape[-1] - forward.length)
            self_seen = mask[:, 0].diagonal(first, -2, -1)[:, : forward.length]
            if mask.dtype != torch.bool:
                self_seen = self_seen > torch.finfo(mask.dtype).min / 2
            return self_seen.expand(forward.batch, -1)
        what = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise CaptureError(
            f"cannot read padding from attention_mask {what} for {forward.batch} sequences of "
            f"{forward.length} tokens after {forward.start}; pass one of shape [batch, tokens] or none"
        )

    def _tokens_before(self, forward: Forward) -> Tensor | int:
        mask = self._arguments.get("attention_mask")
        if (
            forward.start
            and isinstance(mask, Tensor)
            and mask.dim() == 2
            and mask.shape[1] == forward.start + forward.length
        ):
            return mask[:, : forward.start].bool().sum(dim=1).expand(forward.batch)
        return forward.start


def untold(told: BatchRows) -> str:
    """The error for rows that cannot be told."""
    return f"cannot tell which request each row of this forward belongs to: {told.unknown}"


def _returned_cache(output: Any) -> Any:
    values = (
        output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    )
    return next((value for value in values if is_cache(value)), None)


class Refusal:
    """Stands in for ``cache.reorder_cache`` on one cache, for as long as any session follows it."""

    def __init__(self, cache: Any) -> None:
        self._cache = weakref.ref(cache)
        self._followers: set[int] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise CaptureError(
            "beam search reorders the KV cache between forwards, so captured rows would belong to other "
            "sequences than they were computed for; capture with num_beams=1"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """No session follows a copied cache: the copy gets its own class's method back."""
        original = self._cache()
        copied = memo[id(original)]
        return types.MethodType(type(copied).reorder_cache, copied)


def refuse_reordering(cache: Any, follower: object) -> None:
    """Make ``cache.reorder_cache`` raise until `allow_reordering`."""
    if not hasattr(cache, "reorder_cache"):
        return
    refusal = vars(cache).get("reorder_cache")
    if not isinstance(refusal, Refusal):
        refusal = vars(cache)["reorder_cache"] = Refusal(cache)
    refusal._followers.add(id(follower))


def allow_reordering(cache: Any, follower: object) -> None:
    """Undo `refuse_reordering`; the method comes back when nobody follows the cache any more."""
    refusal = vars(cache).get("reorder_cache")
    if isinstance(refusal, Refusal):
        refusal._followers.discard(id(follower))
        if not refusal._followers:
            del vars(cache)["reorder_cache"]
