"""The anatomy provider for `transformers.PreTrainedModel`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from capture_hooks.capture.anatomy import Anatomy
from capture_hooks.errors import BindError

from .lengths import length_rule
from .wiring import wiring_of

#: Containers that put one name between a module and its child: torch.compile, activation
#: checkpointing, FSDP and DDP wrappers, PEFT layers.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module", "module", "base_layer")


class TransformersAnatomy:
    """Finds the parts of any decoder-only language model of transformers by following its forward."""

    name = "transformers"

    def match(self, model: nn.Module) -> int:
        """1 for any Hugging Face model: a provider that knows one family better may claim more."""
        return int(isinstance(model, PreTrainedModel))

    def unwrap(self, model: nn.Module) -> Sequence[nn.Module]:
        """Nothing: transformers itself wraps no model."""
        return ()

    def describe(self, model: nn.Module) -> Anatomy:
        """Find the parts.

        Raises:
            BindError: naming what was looked for and what was found instead.
        """
        if not isinstance(model, PreTrainedModel):
            raise BindError(
                f"{type(model).__name__} is not a Hugging Face model (transformers.PreTrainedModel)"
            )
        if getattr(model.config, "is_encoder_decoder", False):
            raise BindError(
                f"{type(model).__name__} is an encoder-decoder model; "
                "capture specs describe decoder-only models"
            )
        wiring = wiring_of(type(model), model.config)
        layers = [_find(model, name) for name in wiring.layers]
        _check_count(model, wiring.layers, layers[0][0])
        decoder_name, decoder = _find(model, wiring.decoder)
        readout = wiring.readout
        norm_name, norm = _find(model, readout.final_norm) if readout.final_norm is not None else (None, None)
        return Anatomy(
            model=model,
            decoder=decoder,
            decoder_name=decoder_name,
            layers=tuple(layer for _, layer in layers),
            layer_names=tuple(name for name, _ in layers),
            embedding=_find(model, wiring.embedding)[1],
            final_norm=norm,
            final_norm_name=norm_name,
            lm_head=_find(model, readout.lm_head)[1],
            hidden_size=wiring.hidden_size,
            vocab_size=readout.vocab_size,
            split_boundaries=wiring.split,
            logit_scale=readout.scale,
            logit_softcap=readout.softcap,
            readout_gap=readout.gap,
            final_norm_call=readout.norm_call,
            lengths=length_rule(decoder),
        )


def _find(model: nn.Module, name: str) -> tuple[str, nn.Module]:
    """The live module of that name and its name in the live model, stepping through wrappers.

    Raises:
        BindError: when the live model has no such module.
    """
    module: nn.Module = model
    path: list[str] = []
    for part in name.split(".") if name else []:
        while part not in module._modules:
            inner = next((w for w in _WRAPPED if module._modules.get(w) is not None), None)
            if inner is None:
                where = ".".join(path) or type(model).__name__
                raise BindError(
                    f"{type(model).__name__} built from its config has a module {name!r}, "
                    f"but the model at hand has no {part!r} in {where}: it was changed after it was built"
                )
            path.append(inner)
            module = module.get_submodule(inner)
        path.append(part)
        module = module.get_submodule(part)
    return ".".join(path), module


def _check_count(model: PreTrainedModel, expected: tuple[str, ...], first: str) -> None:
    parent = first.rpartition(".")[0]
    siblings = len(list(model.get_submodule(parent).children()))
    if siblings != len(expected):
        raise BindError(
            f"{type(model).__name__} holds {siblings} layers in {parent}, but its config says "
            f"{len(expected)}: set num_hidden_layers of the config to what the model has"
        )
