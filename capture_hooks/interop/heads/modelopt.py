"""ModelOpt's layout: ``layers.0.*``, no ``t2d``; nested ids are its own, top-level ones vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ...conventions import Conventions
from .draft import Draft, HeadFiles
from .eagle import write_plain
from .inputs import chosen_convention


def write_modelopt(draft: Draft, unverified: bool, conventions: Conventions) -> HeadFiles:
    """A head as ModelOpt exports it (0.47.0 ``export/plugins/hf_spec_export.py``)."""
    nested = chosen_convention("modelopt", draft.target.family, unverified, conventions)
    own = {
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        **draft.carried.get("modelopt", {}),
    }
    written = write_plain(draft, "modelopt", "layers.0", nested, conventions, masks=False, own=own)
    return written if draft.normed_twice else replace(written, notes=(*written.notes, *twice(draft.tensors)))


def twice(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """What ModelOpt makes of layer 0's norms, where that is not what servers make of them.

    The stock layer hands ``input_layernorm(h)`` to attention, and a hook there norms it again with
    ``hidden_norm`` (0.47.0 ``modeling_eagle.py:113-125``); the residual takes ``h``.  The second norm undoes
    the first one's division, and its gain too where that is one positive number.
    """
    gain = tensors["midlayer.input_layernorm.weight"].float()
    first = gain.flatten()[0]
    if bool(first > 0) and bool((gain == first).all()):
        return ()
    flat = bool((gain == first).all())
    spread = f"vary by {float(gain.std(unbiased=False) / gain.abs().mean()):.1%} of their mean"
    return (
        "ModelOpt 0.41 and later trains with hidden_norm(input_layernorm(h)) at layer 0, and no single norm "
        f"equals the two: the gains of input_layernorm {f'are {first:g}' if flat else spread}",
    )
