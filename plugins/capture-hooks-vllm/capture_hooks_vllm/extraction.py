"""Points and vLLM's extraction: which ids it is given, and which point each of its columns is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from capture_hooks.capture.anatomy import Anatomy
from capture_hooks.conventions import convention_for
from capture_hooks.errors import ConventionError, EngineError
from capture_hooks.heads.engines import VLLM_KEY
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec, Point

#: In a plan's slots: the final norm of the last boundary.
NORM: Final = -1


@dataclass(frozen=True, slots=True)
class Extraction:
    """What vLLM extracts for one spec.

    Attributes:
        ids: layer ids by vLLM's convention, ascending.
        inputs: for each input of the spec, its place among ``ids``; `NORM` for the final norm.
        target: the target point's place.
        end: the place of the stream's un-normed end, where anything is normed.
    """

    ids: tuple[int, ...]
    inputs: tuple[int, ...]
    target: int
    end: int | None

    @property
    def normed(self) -> bool:
        """Whether the final norm is applied to anything."""
        return self.end is not None

    def split(self, states: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
        """Inputs [T, K*H], packed in the spec's order, and target [T, H].

        Args:
            states: [T, len(ids), H] as extracted.
            norm: the target's final norm, where `normed`.
        """
        parts = dict(enumerate(states.unbind(1)))
        if self.end is not None:
            assert norm is not None
            with torch.no_grad():
                parts[NORM] = norm(parts[self.end])
        return torch.cat([parts[place] for place in self.inputs], dim=1), parts[self.target]


def extraction(anatomy: Anatomy, spec: CaptureSpec, model_type: str, version: str | None) -> Extraction:
    """Plan the capture of ``spec``, whatever its order.

    Args:
        anatomy: the target's.
        spec: what to capture.
        model_type: the target's.
        version: vLLM's, by which its ids mean what they mean; None for the newest that was established.

    Raises:
        SpecError: it does not fit the model.
        EngineError: a point that vLLM does not extract from this family, or a submodule's value.
    """
    resolved = spec.resolve(anatomy.n_layers, anatomy.split_boundaries)
    if anatomy.split_boundaries:
        raise EngineError(
            f"{model_type} adds something to the stream between layers; vLLM's ids do not say on which side"
        )
    sites = [*resolved.inputs, resolved.target]
    points = [*spec.inputs, spec.target]
    for point, site in zip(points, sites, strict=True):
        if site.module is not None:
            raise EngineError(
                f"vLLM extracts the residual stream alone, and {point} is a submodule's value; "
                "the embedded engine and SGLang capture it"
            )
    end, normed = anatomy.n_layers, any(site.norm for site in sites)
    found = {site.boundary for site in sites if site.boundary is not None}
    boundaries = sorted(found | {end} if normed else found)
    try:
        meaning = convention_for("vllm", model_type, VLLM_KEY, version, registry().conventions)
        ids = meaning.from_points([_point(k) for k in boundaries], end)
    except ConventionError as error:
        raise EngineError(f"vLLM cannot extract {spec}: {error}") from None
    place = {boundary: slot for slot, boundary in enumerate(boundaries)}
    slots = [NORM if site.boundary is None else place[site.boundary] for site in sites]
    return Extraction(tuple(ids), tuple(slots[:-1]), slots[-1], place[end] if normed else None)


def model_type_of(anatomy: Anatomy) -> str:
    """The target's ``model_type``: of its text decoder, where it is multimodal."""
    config: Any = anatomy.model.config
    return str(config.get_text_config().model_type)


def _point(boundary: int) -> Point:
    return Point("embed") if boundary == 0 else Point.post(boundary - 1)
