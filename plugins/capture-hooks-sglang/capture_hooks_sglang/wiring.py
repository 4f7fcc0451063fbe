"""The `Anatomy` of an SGLang language model: its parts, and how it hands on its residual stream.

Both are read from a rehearsal.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from capture_hooks.capture.anatomy import Anatomy, Layout
from capture_hooks.errors import BindError

from .forward import rows_of
from .rehearsal import SHAPES, TOKENS, Call, Parts, Rehearsal, config_number, parts_of, rehearse


def describe(model: nn.Module) -> Anatomy:
    """The parts of a model that holds a ``LogitsProcessor`` of SGLang's.

    It is rehearsed until a way for its layers to return their values is the one that it expects.

    Raises:
        BindError: naming what was looked for and what was found instead, or what stood in the way.
    """
    parts = parts_of(model)
    failures: dict[str, None] = {}
    for values in SHAPES:
        run = rehearse(model, parts, values)
        if run.error is None and run.processor is not None:
            try:
                return _understand(model, parts, run)
            except _UnexpectedError as error:
                failures[str(error)] = None
        else:
            failures[f"layers returning {values} value{'s' * (values > 1)}: {_short(run)}"] = None
    raise BindError(
        f"cannot follow how {type(model).__name__} hands its residual stream from layer to layer: "
        + "; ".join(failures)
    )


class _UnexpectedError(Exception):
    """The model does not treat what a replaced layer returned as its layers' output."""


def _short(run: Rehearsal) -> str:
    if run.error is None:
        return "the logits processor was never called"
    text = str(run.error).strip().splitlines()
    return f"{type(run.error).__name__}: {text[0][:160]}" if text else type(run.error).__name__


def _understand(model: nn.Module, parts: Parts, run: Rehearsal) -> Anatomy:
    name, calls = _the_layers(model, parts, run)
    width = _width(name, calls)
    argument = _chain(name, calls)
    layout, end, last = _layout(name, calls, argument, run)
    fed, head = _logits_arguments(run)
    # The model itself may multiply the normed state before the logits processor is given it.
    scale, gap = _before_logits(fed, end if last is None else _value(last.output))
    processor: Any = run.processor
    norm = None if last is None else last.module
    embedding, root = _token_embedding(model, run), _root(model, name, run, norm)
    names = {id(module): name for name, module in model.named_modules()}
    return Anatomy(
        model=model,
        decoder=root,
        decoder_name=names[id(root)],
        layers=tuple(call.module for call in calls),
        layer_names=tuple(names[id(call.module)] for call in calls),
        embedding=embedding,
        final_norm=norm,
        final_norm_name=None if norm is None else names[id(norm)],
        lm_head=head,
        hidden_size=width,
        vocab_size=int(processor.vocab_size),
        layout=layout,
        split_boundaries=frozenset(_deepstack(model, root, len(calls))),
        logit_scale=scale * float(processor.logit_scale or 1.0),
        logit_softcap=processor.final_logit_softcapping or None,
        readout_gap=gap,
        rows=rows_of,
    )


def _deepstack(model: nn.Module, decoder: nn.Module, n_layers: int) -> range:
    """Boundaries where the decoder adds visual features between layers (DeepStack, arXiv 2406.04334).

    One set after each of layers 0, 1, …: as many as the model says, else every boundary between layers.
    """
    if not any("deepstack" in name for name in inspect.signature(type(decoder).forward).parameters):
        return range(0)
    levels = config_number(model, "num_deepstack_embeddings")
    levels = getattr(model, "num_deepstack_embeddings", levels)
    return range(1, min(levels, n_layers) + 1 if levels else n_layers)


def _the_layers(model: nn.Module, parts: Parts, run: Rehearsal) -> tuple[str, list[Call]]:
    """The one list whose elements were called once each and in order."""
    found, orders = [], []
    for name, items in parts.lists.items():
        place = {id(element): k for k, element in enumerate(items)}
        calls = [call for call in run.layers if id(call.module) in place]
        order = [place[id(call.module)] for call in calls]
        if order == list(range(len(items))):
            found.append((name, calls))
        if order:
            orders.append(f"{name} ({len(items)} layers; calls: {order[:12]}{' …' * (len(order) > 12)})")
    if len(found) == 1 and len(orders) == 1:
        return found[0]
    raise BindError(
        f"{type(model).__name__}: expected one list whose layers are each called once and in order for a "
        f"text, found {', '.join(orders) or 'none'}; 'leaving layer k' has no single meaning here"
    )


def _width(name: str, calls: list[Call]) -> int:
    first = calls[0].tensors()
    hidden = first.get("hidden_states", next(iter(first.values())))
    if hidden.dim() != 2 or hidden.shape[0] != TOKENS:
        raise BindError(
            f"{name}.0 takes a state {list(hidden.shape)} for {TOKENS} tokens, not [{TOKENS}, width]: "
            "this model carries several streams side by side"
        )
    return int(hidden.shape[1])


def _first(call: Call) -> Any:
    return call.output[0] if isinstance(call.output, tuple) else call.output


def _chain(name: str, calls: list[Call]) -> str:
    """Each layer is given the one before it; returns the parameter that takes it."""
    parameters = set()
    for k, (before, after) in enumerate(itertools.pairwise(calls)):
        taking = [p for p, value in after.given.items() if value is _first(before)]
        if not taking:
            raise _UnexpectedError(
                f"{name}.{k + 1} is not given what {name}.{k} returned: the model changes it in between"
            )
        parameters.add(taking[0])
    if len(parameters) > 1:
        raise BindError(f"the layers of {name} take the stream by different names: {sorted(parameters)}")
    return parameters.pop() if parameters else "hidden_states"


def _layout(
    name: str, calls: list[Call], argument: str, run: Rehearsal
) -> tuple[Layout, Tensor, Call | None]:
    """The layout, the end of the stream, and the final norm.

    A layer that takes and gives a ``residual`` need not leave anything to be added (Cohere): what the final
    norm makes of the two decides.
    """
    last = calls[-1].output
    if run.streamed or isinstance(last, Tensor):
        end = _first(calls[-1])
        return ("stream" if run.streamed else "plain"), end, _norm_of(run, end)
    carried: set[tuple[int, str]] = set()
    for before, after in itertools.pairwise(calls):
        for i, value in enumerate(before.output[1:], start=1):
            carried |= {(i, p) for p, given in after.given.items() if given is value}
    strange = sorted({p for _, p in carried if p not in ("residual", argument)})
    residual = next((i for i, p in carried if p == "residual"), None)
    if residual is not None and (norm := _norm_of(run, last[0] + last[residual])) is not None:
        return "pair", last[0] + last[residual], norm
    if strange or (residual is not None and _norm_of(run, last[0]) is None):
        what = ", ".join(strange or ["residual"])
        raise BindError(
            f"the layers of {name} hand on {what} beside {argument}, and no final norm shows how the two "
            "make the residual stream"
        )
    return "plain", last[0], _norm_of(run, last[0])


def _norm_of(run: Rehearsal, end: Tensor) -> Call | None:
    """The norm outside the layers that gave the norm of ``end``."""
    for call in run.norms:
        given, output = list(call.tensors().values()), _value(call.output)
        if not given or given[0].shape != end.shape or not isinstance(output, Tensor):
            continue
        alone = _value(call.module(end.clone()))
        # The sum may be rounded once more on its way; another end of the stream is nowhere near.
        if torch.allclose(alone.float(), output.float(), rtol=0.05, atol=0.02 * float(output.abs().max())):
            return call
    return None


def _value(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _logits_arguments(run: Rehearsal) -> tuple[Any, nn.Module]:
    given = run.logits
    head = given.get("lm_head")
    if not isinstance(head, nn.Module):
        raise BindError(f"the logits processor is given {type(head).__name__} for an lm_head, not a module")
    return given.get("hidden_states"), head


def _token_embedding(model: nn.Module, run: Rehearsal) -> nn.Module:
    """The first embedding called with a row for every token id."""
    vocabulary = int(getattr(run.processor, "vocab_size", 0))
    for module in run.embeddings:
        weight: Any = module.weight
        if weight.shape[0] >= vocabulary or getattr(module, "num_embeddings", 0) >= vocabulary:
            return module
    raise BindError(f"{type(model).__name__} looks up no embedding of its {vocabulary} token ids")


def _before_logits(fed: Any, value: Any) -> tuple[float, str | None]:
    """What lies between the final norm (or the end of the stream) and the logits processor."""
    if not isinstance(fed, Tensor) or not isinstance(value, Tensor) or fed.shape != value.shape:
        shape = list(fed.shape) if isinstance(fed, Tensor) else type(fed).__name__
        return 1.0, f"the logits processor is fed {shape}, not the final norm's output"
    if fed is value or torch.equal(fed, value):
        return 1.0, None
    at = int(value.abs().argmax())
    factor = float(fed.flatten()[at].double() / value.flatten()[at].double())
    if torch.allclose(
        fed.double(), value.double() * factor, rtol=1e-2 if fed.dtype != torch.float32 else 1e-5
    ):
        return float(f"{factor:.6g}"), None
    return 1.0, "between the final norm and the logits processor the model applies more than a factor"


def _root(model: nn.Module, name: str, run: Rehearsal, norm: nn.Module | None) -> nn.Module:
    """The innermost module around the layers and the final norm whose hooks fire."""
    entered = {id(module) for module in run.entered}
    parent = name.rpartition(".")[0]
    while parent:
        module = model.get_submodule(parent)
        if id(module) in entered and (norm is None or any(part is norm for part in module.modules())):
            return module
        parent = parent.rpartition(".")[0]
    raise BindError(
        f"{type(model).__name__} runs its layers and final norm in its own forward, which SGLang calls "
        "without hooks; no module around them shows where a forward begins and ends"
    )
