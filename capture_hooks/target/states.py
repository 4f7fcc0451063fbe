"""The states of given tokens: shared by every part that runs a target to capture states.

`states_of` gives the captured states of a few sequences.  `BatchForward` runs a data set through the target,
batch by batch, for a dump: captured states and the greedy next tokens.  There sequences are padded on the
right and no attention mask is passed: under causal attention nothing before a row sees the padding after it,
and without a mask attention takes its fastest path and no value is looked at on the way, so an accelerator is
never waited for.

A sequence with images runs alone, with exactly what the target's processor gives: families differ in how
they batch pixels, grids and sizes and in positions (M-RoPE); alone, nothing can be put together wrongly.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..capture import CaptureSession, States, bind
from ..capture.anatomy import Anatomy
from ..errors import CaptureError, ModelError, StoreError
from ..foreign import calling
from ..spec import CaptureSpec

#: Rows whose logits over the full vocabulary exist at one time.
LOGIT_ROWS = 512
#: Tokens of the trial that `BatchForward.check` makes.
TRIAL_TOKENS = 32
#: How far two passes over a row may be apart: bfloat16 rounds to 1/256, and experts see other batches.
_ROUNDING: Final = 0.02
#: How configurations of transformers name such tokens: image_token_id, vision_start_token_id, ...
_MEDIA_TOKEN: Final = re.compile(r"(image|video|vision|frame|audio|boi|eoi|boa|eoa)(_\w+)?_token_(id|index)$")
_PLACEHOLDER: Final = re.compile(r"(image|video|audio)_token_(id|index)$")


@torch.no_grad()
def states_of(capture: CaptureSession, sequences: Sequence[Tensor], *, stop: bool = False) -> list[States]:
    """The captured states of each sequence, from one forward in eval mode.

    Args:
        capture: bound to the target, and not entered.
        sequences: token ids [T] each, of lengths that may share a forward (`LengthRule.alike`).
        stop: end the forward once the last point is captured.

    Raises:
        CaptureError: the target cannot read them, or a state is NaN or infinite.
    """
    anatomy = capture.anatomy
    device = next(anatomy.embedding.parameters()).device
    ids = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).to(device)
    arguments = {}
    if len(sequences) > 1:
        lengths = torch.tensor([len(one) for one in sequences], device=device)
        arguments["attention_mask"] = (torch.arange(ids.shape[1], device=device) < lengths[:, None]).long()
    anatomy.lengths.forget()
    cannot = f"{type(anatomy.model).__name__} cannot read {ids.shape[1]} tokens on {device}"
    with evaluating(capture.model), capture, calling(cannot, CaptureError):
        capture.run(input_ids=ids, use_cache=False, stop=stop, **arguments)
    found = capture.states
    found.check_finite()
    return [found] if len(sequences) == 1 else [found.sequence(i) for i in range(len(sequences))]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode (no dropout) inside the block; afterwards every module is in its own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@dataclass(frozen=True, slots=True)
class CapturedBatch:
    """A batch of B sequences, T columns, on its way to the CPU; `wait` before reading.

    Attributes:
        states: [B, T, C]; target: [B, T, H] or None where an input is the target; argmax: [n] for the n real
        tokens, sequence after sequence.
        lengths: real tokens of each sequence.
    """

    states: Tensor
    target: Tensor | None
    argmax: Tensor
    lengths: tuple[int, ...]
    arrived: tuple[torch.cuda.Event, ...] = ()

    def wait(self) -> None:
        """Wait until the copies have arrived."""
        for event in self.arrived:
            event.synchronize()


class BatchForward:
    """A model bound to a spec, whose states and greedy tokens a dump keeps.

    Raises:
        SpecError, BindError: the spec does not fit the model.
        StoreError: the model is in training mode, where dropout would change the states.
    """

    def __init__(self, model: nn.Module, spec: CaptureSpec, anatomy: Anatomy) -> None:
        if anatomy.model.training:
            raise StoreError("the model is in training mode, where dropout changes states; call model.eval()")
        self.anatomy = anatomy
        self._model = model
        self._session = bind(model, spec, target=True, anatomy=anatomy)
        resolved = spec.resolve(anatomy.n_layers, anatomy.split_boundaries)
        self.spec = spec.absolute(anatomy.n_layers)
        self.target_input = (
            resolved.inputs.index(resolved.target) if resolved.target in resolved.inputs else None
        )
        self.target_normed = resolved.target.norm
        self.device = next(anatomy.embedding.parameters()).device
        self._whole = _needs_whole_model(model, anatomy, spec)

    @property
    def session(self) -> CaptureSession:
        """The capture session; enter it around `capture`."""
        return self._session

    @torch.inference_mode()
    def capture(self, sequences: Sequence[Tensor]) -> CapturedBatch:
        """Run the target over sequences of token ids [T] each; the session must be entered."""
        lengths = tuple(map(len, sequences))
        batch = nn.utils.rnn.pad_sequence(list(sequences), batch_first=True).to(
            self.device, non_blocking=True
        )
        self._session.clear()
        self.anatomy.lengths.forget()
        argmax = self._argmax(batch, lengths)
        states = self._session.states
        grid = batch.shape
        target = None if self.target_input is not None else states.target.view(*grid, -1)
        return _to_cpu(states.packed.view(*grid, -1), target, argmax, lengths)

    @torch.inference_mode()
    def capture_images(self, inputs: Mapping[str, Tensor]) -> CapturedBatch:
        """Run the target over one sequence with images (`Media.inputs`); the session must be entered."""
        self._session.clear()
        self.anatomy.lengths.forget()
        argmax, lengths = self._argmax_with_images(inputs), (inputs["input_ids"].shape[1],)
        states = self._session.states
        target = None if self.target_input is not None else states.target[None]
        return _to_cpu(states.packed[None], target, argmax, lengths)

    @torch.inference_mode()
    def check(self, tokens: Tensor) -> tuple[tuple[int, ...], int]:
        """Trial run: widths of the inputs and of the target; makes sure that ``argmax`` is the model's own.

        Raises:
            StoreError: the model does not run, or its logits are not those of its output layer over its
                decoder's output.
            ModelError: its states depend on later tokens.
        """
        tokens = tokens[:TRIAL_TOKENS]
        cannot = f"{type(self.anatomy.model).__name__} cannot read {len(tokens)} tokens on {self.device}"
        with self._session, calling(cannot, StoreError):
            self.capture([tokens])
            states = self._session.states
            widths = tuple(span.stop - span.start for span in states.columns.values())
            target_width = states.target.shape[-1]
            ours = self._argmax(tokens[None].to(self.device), (len(tokens),)).cpu()
        self.anatomy.lengths.forget()
        with calling(cannot, StoreError):
            own = self._model(input_ids=tokens[None].to(self.device), use_cache=False)
        logits = own.logits[0].float().cpu()
        best = logits.max(-1).values
        chosen = logits.gather(-1, ours[:, None])[:, 0]
        # Equal up to ties that rounding may break either way: far below any gap that wrong wiring makes.
        wrong = (best - chosen > 0.01 * logits.std(-1)).nonzero().flatten()
        if len(wrong):
            at = int(wrong[0])
            raise StoreError(
                f"{type(self.anatomy.model).__name__} does not compute its logits from its decoder's output "
                f"alone: at position {at} its greedy token is {int(logits[at].argmax())}, the output layer "
                f"over the decoder's output gives {int(ours[at])}; this model cannot be dumped"
            )
        with self._session:
            check_causal(self._model, lambda ids: _rows(self.capture([ids])), tokens, len(tokens) - 1)
        return widths, target_width

    @torch.inference_mode()
    def check_images(self, inputs: Mapping[str, Tensor], ids: Tensor, at: int) -> None:
        """As `check`, for a sequence with images: no state before the learnt token at ``at`` depends on it.

        Args:
            inputs: what the target's processor gives (`Media.inputs`).
            ids: the token ids [T] of the sequence.
            at: the position.

        Raises:
            ModelError: one does, as under PaliGemma's mask, which lets a whole prompt see itself.
        """

        def run(tokens: Tensor) -> Tensor:
            return _rows(self.capture_images({**inputs, "input_ids": tokens[None]}))

        with self._session:
            check_causal(self._model, run, ids, at)

    def _argmax(self, batch: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """[n] greedy next token after each real row.  Scaling and soft-capping logits keep their order."""
        if self._whole:
            logits = self._model(input_ids=batch, use_cache=False).logits
            return torch.cat([logits[row, :length].argmax(-1) for row, length in enumerate(lengths)])
        hidden = self.anatomy.decoder(input_ids=batch, use_cache=False)[0]
        rows = torch.cat([hidden[row, :length] for row, length in enumerate(lengths)])
        return self._greedy(rows)

    def _argmax_with_images(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """As `_argmax`.  The whole model puts the images in; its decoder's output is taken on the way out."""
        seen: list[Tensor] = []
        handle = self.anatomy.decoder.register_forward_hook(
            lambda module, args, output: seen.append(output[0])
        )
        try:
            run_with_images(self._model, inputs, self.device)
        finally:
            handle.remove()
        return self._greedy(seen[0][0])

    def _greedy(self, rows: Tensor) -> Tensor:
        """[n] arg-max tokens of the decoder's output [n, H]."""
        return torch.cat([self.anatomy.lm_head(chunk).argmax(-1) for chunk in torch.split(rows, LOGIT_ROWS)])


def check_causal(model: nn.Module, run: Callable[[Tensor], Tensor], ids: Tensor, at: int) -> None:
    """Whether a target looks back only, as what is learnt and served takes for granted.

    Args:
        model: the target, for the message.
        run: gives the states [T, C] of token ids [T].
        ids: a sequence.
        at: the position of a token that stands for itself; another one is put there.

    Raises:
        ModelError: a state before ``at`` changes with the token there.
    """
    # A token of an image would ask for the image.
    kept = torch.tensor([int(ids[at]), *image_tokens(model)], dtype=ids.dtype, device=ids.device)
    others = ids[:at][~torch.isin(ids[:at], kept)]
    if not len(others):
        return
    changed = ids.clone()
    changed[at] = others[0]
    before, after = (run(tokens)[:at].float() for tokens in (ids, changed))
    apart = (before - after).norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-9)
    if float(apart.max()) > _ROUNDING:
        raise ModelError(
            f"{type(model).__name__} reads tokens before they are written: the state at position "
            f"{int(apart.argmax())} changes by {float(apart.max()):.0%} with the token at {at}; a draft head "
            "needs a target that only looks back"
        )


def image_tokens(model: nn.Module) -> frozenset[int]:
    """Ids of the tokens that stand for images, video or sound, or surround them, by the configuration."""
    return _tokens_named(model, _MEDIA_TOKEN)


def placeholder_tokens(model: nn.Module) -> frozenset[int]:
    """Ids of the tokens that stand for an image, a video or a sound, by the configuration."""
    return _tokens_named(model, _PLACEHOLDER)


def _tokens_named(model: nn.Module, names: re.Pattern[str]) -> frozenset[int]:
    config: Any = getattr(model, "config", None)
    fields: dict[str, Any] = config.to_dict() if hasattr(config, "to_dict") else {}
    return frozenset(id_ for name, id_ in fields.items() if names.match(name) and type(id_) is int)


def _rows(captured: CapturedBatch) -> Tensor:
    """The states [T, C] of the first sequence, once they are there."""
    captured.wait()
    return captured.states[0]


def run_with_images(model: nn.Module, inputs: Mapping[str, Tensor], device: torch.device) -> Any:
    """A forward of the whole model over what its processor made of one sequence; gives its output.

    Logits are asked for at the last row alone where the model can leave out the others.
    """
    ready: dict[str, Any] = placed(model, inputs, device)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        ready["logits_to_keep"] = 1
    with _positions_kept(model):
        return model(**ready, use_cache=False)


def placed(model: nn.Module, inputs: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """On the device, floating-point tensors in the model's dtype, as ``BatchFeature.to`` puts them."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return {
        name: value.to(device, dtype if value.is_floating_point() else None) for name, value in inputs.items()
    }


@contextmanager
def _positions_kept(model: nn.Module) -> Iterator[None]:
    """Models with M-RoPE keep how far a prompt's images shift positions: it is not for other prompts."""
    found = [(module, module.rope_deltas) for module in model.modules() if hasattr(module, "rope_deltas")]
    try:
        yield
    finally:
        for module, before in found:
            module.rope_deltas = before


def _needs_whole_model(model: nn.Module, anatomy: Anatomy, spec: CaptureSpec) -> bool:
    """Whether a point or part of the readout lies outside the decoder, or it cannot be called apart."""
    decoder = set(anatomy.decoder.modules())
    points = (*spec.inputs, spec.target)
    outside = any(point.module is not None for point in points) or (
        anatomy.final_norm is not None and anatomy.final_norm not in decoder
    )
    apart = anatomy.decoder is not anatomy.model and anatomy.readout_gap is None
    # Compiled code is entered where it was compiled.
    return (
        outside
        or not apart
        or any(
            "_orig_mod" in module._modules or module._compiled_call_impl is not None
            for module in model.modules()
        )
    )


def _to_cpu(states: Tensor, target: Tensor | None, argmax: Tensor, lengths: tuple[int, ...]) -> CapturedBatch:
    tensors = [states, argmax] if target is None else [states, argmax, target]
    copies = [_start_copy(tensor) for tensor in tensors]
    # Under a device_map the tensors may lie on several devices; each has its own stream to wait for.
    events = []
    for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # unannotated in torch
        event.record(torch.cuda.current_stream(device))
        events.append(event)
    return CapturedBatch(copies[0], None if target is None else copies[2], copies[1], lengths, tuple(events))


def _start_copy(tensor: Tensor) -> Tensor:
    """On CUDA it runs behind the kernels queued so far into pinned memory; elsewhere it is done now."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
