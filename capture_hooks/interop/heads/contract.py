"""A draft head as it lies on disk, in any library's layout, before anything is made of it.

Names of tensors are brought to one form (*canonical*), values are not touched:

========================  ==========================================================================
canonical                 others
========================  ==========================================================================
``midlayer.*``            ``layers.0.*`` (speculators, ModelOpt), ``model.layers.0.*``
``layers.N.*``            the same for N >= 1
``fc_norm.0``, ``.1``...  ``aux_norm_low``, ``aux_norm_mid``, ``aux_norm_high``
everything else           without a leading ``model.``
========================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...errors import HeadError
from ...heads.config import CaptureSection
from ...heads.files import TensorInfo, check_finite
from .pickled import read_pickled

#: *capture-hooks*: with a capture section.  *speculators*: with ``speculators_model_type``.  *eagle*:
#: ``midlayer.*`` (SafeAILab/EAGLE, SpecForge).  *modelopt*: ``layers.0.*`` beside a plain config (ModelOpt).
Layout = Literal["capture-hooks", "speculators", "modelopt", "eagle"]


@dataclass(frozen=True, slots=True)
class Flags:
    """What a head computes, as far as its file says; None where it does not say.

    Attributes:
        norm_before_residual: layer 0's residual is ``hidden_norm(h)`` instead of ``h``.
        norm_before_fc: one RMSNorm over the concatenated inputs (``input_norm``).
        fc_norm: one RMSNorm for each input (``fc_norm.i``).
        norm_output: what is fed back is the output after ``norm``, as SGLang, vLLM and speculators mean it.
        norm_before_lm_head: ``norm`` is applied before ``lm_head``.  SpecForge 0.2.0 calls that
            ``norm_output`` (``modeling/draft/llama3_eagle.py:1690,1773``), so in layout *eagle* a top-level
            ``norm_output`` can be either: both are None then, and ``RawHead.fields["norm_output"]`` has it.
        use_aux_hidden_state: it eats intermediate states; false means one final state.
    """

    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    norm_before_lm_head: bool | None = None
    use_aux_hidden_state: bool | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies: its file and the name it has in it."""

    file: Path
    name: str


def read_stored(path: Path, names: Sequence[str]) -> dict[str, Tensor]:
    """Tensors of one file by the names they have in it, on the CPU, bits as in the file.

    Raises:
        HeadError: it is damaged, or changed since it was looked into.
    """
    if path.suffix != ".safetensors":
        held = read_pickled(path)
        if lost := [name for name in names if name not in held]:
            raise HeadError(f"{path} was changed while it was read: {lost[0]} is gone")
        return {name: held[name] for name in names}
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (OSError, SafetensorError) as error:
        raise HeadError(f"{path} is damaged, truncated or no safetensors file: {error}") from None


@dataclass(frozen=True, slots=True)
class RawHead:
    """A head's directory, read from its config and its files' headers alone.

    Attributes:
        layout: whose names and nesting it has.
        directory: where it lies.
        config: the whole ``config.json`` as it stands.
        fields: the draft's Llama-style fields, flattened out of ``transformer_layer_config`` where they are
            nested; values as they stand, nothing filled in.
        flags: what it computes, as far as it says.
        ids: every list of layer ids, by dotted key, as it stands (of whatever type).
        tensors: shape and dtype by canonical name.
        names: file and name in it, by canonical name.
        section: the capture section; None in other libraries' heads.
        problems: what no reader could make sense of, a sentence each (a flag that is no boolean, ...).
    """

    layout: Layout
    directory: Path
    config: Mapping[str, Any]
    fields: Mapping[str, Any]
    flags: Flags
    ids: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    names: Mapping[str, Stored]
    section: CaptureSection | None
    problems: tuple[str, ...] = ()

    def read(self) -> dict[str, Tensor]:
        """Every tensor by canonical name, on the CPU, bits as in the file.

        Raises:
            HeadError: a file is damaged or changed since, or a tensor holds NaN or infinity.
        """
        found: dict[str, Tensor] = {}
        for path in sorted({stored.file for stored in self.names.values()}):
            here = {name: stored.name for name, stored in self.names.items() if stored.file == path}
            tensors = read_stored(path, tuple(here.values()))
            found |= {name: tensors[own] for name, own in here.items()}
        check_finite(found, str(self.directory))
        return found
