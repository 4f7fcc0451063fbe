"""From the target's layers to what is stored for the draft head, checked at every forward.

Two mechanisms.  *Native*: the decoder's own list of boundaries, set as boundaries, where it has one that
captures the stream.  *Hooks*: ours, where it has none or cannot express a point; the packed states enter at
the logits processor, where SGLang expects ``aux_hidden_states``, and go on from there as its own do.
No value is looked at during a forward, so both may be recorded in a CUDA graph.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from torch import Tensor, nn

from capture_hooks.capture import Anatomy, find_anatomy
from capture_hooks.capture.plan import Plan, lay_out
from capture_hooks.errors import EngineError
from capture_hooks.spec import CaptureSpec, Site

from ..forward import check_mode, expected_rows
from .request import CaptureRequest

Mechanism = Literal["native", "hooks"]

#: The decoder's list of boundaries to capture (``sglang/srt/models``, most families).
_NATIVE: Final = "layers_to_capture"


@dataclass(frozen=True, slots=True)
class Route:
    """How the points of one spec are captured in one model.

    Attributes:
        spec: layers absolute, in the order delivered.
        boundaries: of each point; None for one that lies on no boundary.
        mechanism: whose capture it is.
        reason: why not the model's own, where it is ours.
        width: values delivered for a token.
    """

    spec: CaptureSpec
    boundaries: tuple[int | None, ...]
    mechanism: Mechanism
    reason: str
    width: int


def choose_route(anatomy: Anatomy, spec: CaptureSpec, reads: nn.Module) -> Route:
    """Decide for one model.

    Args:
        anatomy: its parts.
        spec: what to capture.
        reads: the module that holds the flag for its own capture (the logits processor's owner).

    Raises:
        SpecError: a layer out of range.
        BindError: a point that this model does not have.
    """
    resolved = spec.resolve(anatomy.n_layers, anatomy.split_boundaries)
    boundaries = tuple(_boundary(site) for site in resolved.inputs)
    reason = _not_native(anatomy, spec, boundaries, reads)
    return Route(
        spec=spec.absolute(anatomy.n_layers),
        boundaries=boundaries,
        mechanism="hooks" if reason else "native",
        reason=reason,
        width=len(spec) * anatomy.hidden_size,
    )


def _boundary(site: Site) -> int | None:
    return site.boundary if site.module is None and not site.norm else None


def _not_native(
    anatomy: Anatomy, spec: CaptureSpec, boundaries: tuple[int | None, ...], reads: nn.Module
) -> str:
    """Why the model's own capture cannot be used; empty where it can."""
    decoder, name = anatomy.decoder, type(anatomy.decoder).__name__
    if not hasattr(decoder, _NATIVE) or not hasattr(reads, "capture_aux_hidden_states"):
        return f"{name} has no capture of its own"
    if hasattr(decoder, "set_eagle3_layers_to_capture"):
        return f"{name} marks its layers and never clears the marks"
    if anatomy.layout != "stream":
        return f"{name} hands on the residual apart, and its own capture leaves it out"
    if anatomy.split_boundaries:
        return f"{name} adds something between layers, where its own capture does not say on which side"
    known = [b for b in boundaries if b is not None and b < anatomy.n_layers]
    if len(known) < len(boundaries):
        last = spec.inputs[next(i for i, b in enumerate(boundaries) if b is None or b >= anatomy.n_layers)]
        return f"{name} captures what enters a layer, and {last} enters none"
    if known != sorted(known):
        return f"{name} captures in ascending depth, and {spec} is in another order"
    return ""


class Delivery:
    """The capture of one target in one process: attached once, for the life of the server."""

    def __init__(self, anatomy: Anatomy, spec: CaptureSpec) -> None:
        """Find a route; nothing is attached yet.

        Raises:
            EngineError: a point whose width is not the stream's, which no draft head of SGLang's can eat.
            SpecError, BindError: as `choose_route`.
        """
        self.anatomy = anatomy
        self._owner, self._processor = logits_processor_of(anatomy)
        self.route = choose_route(anatomy, spec, self._owner)
        self._plan: Plan = lay_out(anatomy, spec, target=False)
        for tap in self._plan.taps:
            if tap.width != anatomy.hidden_size:
                raise EngineError(
                    f"{tap.point} is {tap.width or 'of unknown width'}; SGLang's draft heads eat states as "
                    f"wide as the stream ({anatomy.hidden_size})"
                )
        self._packed: Tensor | None = None
        self._fired = 0
        self._argument = _position_of(self._processor, "aux_hidden_states")
        self._before_norm = _position_of(self._processor, "hidden_states_before_norm")
        self._signature = inspect.signature(self._processor.forward)

    def attach(self) -> None:
        """Make every forward of the target deliver."""
        if self.route.mechanism == "native":
            setattr(self.anatomy.decoder, _NATIVE, list(self.route.boundaries))
            self._owner.capture_aux_hidden_states = True
        else:
            if hasattr(self._owner, "capture_aux_hidden_states"):
                self._owner.capture_aux_hidden_states = False
            self.anatomy.decoder.register_forward_pre_hook(self._begin)
            for index, tap in enumerate(self._plan.taps):
                module, hook = tap.place.module, self._tap(index)
                if tap.place.when == "before":
                    module.register_forward_pre_hook(hook, with_kwargs=True)
                else:
                    module.register_forward_hook(hook, with_kwargs=True)
        self._processor.register_forward_pre_hook(self._hand_over, with_kwargs=True)
        self._processor.register_forward_hook(self._check, with_kwargs=True)

    # -- hooks ---------------------------------------------------------------------------------------

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._packed, self._fired = None, 0

    def _tap(self, index: int) -> Callable[..., None]:
        read, width = self._plan.taps[index].place.read, self.anatomy.hidden_size
        first, last = index * width, (index + 1) * width

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
            state = read(args, kwargs, output)
            if self._packed is None:
                self._packed = state.new_empty(*state.shape[:-1], self.route.width)
            self._packed[..., first:last].copy_(state)
            self._fired += 1

        return hook

    def _hand_over(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put our states where SGLang's own would be; keep out what it would store instead of them."""
        bound = list(args)
        if self.route.mechanism == "hooks":
            if self._fired != len(self.route.spec):
                raise EngineError(
                    f"{self._fired} of {len(self.route.spec)} points fired in a forward of "
                    f"{type(self.anatomy.model).__name__}: {self.route.spec} cannot be delivered"
                )
            _put(bound, kwargs, self._argument, "aux_hidden_states", self._packed)
            self._packed = None
        _put(bound, kwargs, self._before_norm, "hidden_states_before_norm", None)
        return tuple(bound), kwargs

    def _check(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Every row is there, and as wide as the head's input."""
        given = self._signature.bind(*args, **kwargs).arguments
        metadata = given["logits_metadata"]
        check_mode(metadata.forward_mode.name)
        expected = expected_rows(metadata, int(given["hidden_states"].shape[0]))
        stored: Tensor | None = getattr(output, "hidden_states", None)
        found = None if stored is None else int(stored.shape[0])
        if found != expected.rows and not (expected.rows is None and stored is None):
            raise EngineError(
                f"a forward in mode {expected.mode}, which should store {expected.rows} rows "
                f"({expected.capture}), stored {found}"
            )
        if stored is None:
            return
        if stored.shape[-1] != self.route.width:
            raise EngineError(
                f"{self.route.spec} is {self.route.width} values wide, and {stored.shape[-1]} were stored "
                f"in forward mode {expected.mode} (a tensor-parallel shard, or another state)"
            )


def logits_processor_of(anatomy: Anatomy) -> tuple[Any, nn.Module]:
    """The module that owns the logits processor, and the processor.

    Raises:
        EngineError: there is none, or several.
    """
    found: list[tuple[Any, nn.Module]] = [
        (owner, processor)
        for owner in anatomy.model.modules()
        if isinstance(processor := getattr(owner, "logits_processor", None), nn.Module)
    ]
    if len({id(processor) for _, processor in found}) != 1:
        raise EngineError(
            f"{type(anatomy.model).__name__} has {len(found)} logits processors; states are handed over at "
            "the one that a language model has"
        )
    return found[-1]


def _position_of(module: nn.Module, name: str) -> int:
    """Where ``name`` stands among the parameters of ``module.forward``.

    Raises:
        EngineError: it takes no such parameter.
    """
    names = list(inspect.signature(module.forward).parameters)
    if name not in names:
        raise EngineError(
            f"{type(module).__name__}.forward takes no {name} in this version of SGLang "
            f"(it takes {', '.join(names)}); capture-hooks-sglang knows 0.5.23"
        )
    return names.index(name)


def _put(args: list[Any], kwargs: dict[str, Any], position: int, name: str, value: Any) -> None:
    if position < len(args):
        args[position] = value
    else:
        kwargs[name] = value


#: Modes in which the draft reads the target's states; in the others it reads its own last output.
_FROM_TARGET = frozenset({"EXTEND", "MIXED", "DRAFT_EXTEND_V2"})


def attach_draft_check(runner: Any, asked: CaptureRequest) -> None:
    """Check every forward of the draft model of ``runner``.

    Raises:
        EngineError: it has no ``fc`` to feed.
    """
    decoder = getattr(runner.model, "model", None)
    fc = getattr(decoder, "fc", None)
    if decoder is None or fc is None:
        raise EngineError(
            f"the draft model {type(runner.model).__name__} has no fc over captured states; "
            f"{asked.source} is a head that has one"
        )
    wide, own = int(fc.in_features), int(fc.out_features)

    def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch = next(value for value in (*args, *kwargs.values()) if hasattr(value, "forward_mode"))
        mode = batch.forward_mode.name
        states, tokens = batch.spec_info.hidden_states, args[0] if args else kwargs["input_ids"]
        width = wide if mode in _FROM_TARGET else own
        if mode == "IDLE" or (states.shape[0] == tokens.shape[0] and states.shape[-1] == width):
            return
        raise EngineError(
            f"in forward mode {mode} the draft head was given {list(states.shape)} for {tokens.shape[0]} "
            f"tokens; it eats {width} values for each"
        )

    decoder.register_forward_pre_hook(check, with_kwargs=True)


def lend_embedding(target: Any) -> None:
    """Give ``target`` the method by which the draft worker takes its embedding and output table.

    About half of SGLang 0.5.23's families have ``get_embed_and_head``; Gemma 2, Granite, Mixtral, OLMo 2 and
    Phi are among those that do not.

    Raises:
        BindError: its parts cannot be found.
    """
    if hasattr(target, "get_embed_and_head"):
        return
    anatomy = find_anatomy(target)
    target.get_embed_and_head = lambda: (anatomy.embedding.weight, anatomy.lm_head.weight)
