"""How a target's states become its logits, for the point whose logits a head learns."""

from __future__ import annotations

from torch import Tensor

from ..capture.anatomy import Anatomy
from ..errors import HeadError
from ..spec import CaptureSpec
from .contract import TargetReadout


def readout_of(anatomy: Anatomy, spec: CaptureSpec) -> TargetReadout:
    """The readout of ``spec.target``: ``final_norm``, or the un-normed end of the stream.

    Raises:
        HeadError: the target point is neither, ``lm_head`` has no plain weight, or the model does more
            than project, scale and cap.
    """
    site = spec.target.resolve(anatomy.n_layers, anatomy.split_boundaries)
    if not site.norm and site.boundary != anatomy.n_layers:
        raise HeadError(
            f"the target point {spec.target} has no logits: choose final_norm, "
            f"or post.{anatomy.n_layers - 1} (the end of the stream before the norm)"
        )
    if anatomy.readout_gap is not None:
        raise HeadError(
            f"{type(anatomy.model).__name__}'s logits cannot be computed from {spec.target}: "
            f"{anatomy.readout_gap}; a draft head learns from a scaled projection of its target point"
        )
    weight, bias = getattr(anatomy.lm_head, "weight", None), getattr(anatomy.lm_head, "bias", None)
    if (
        not isinstance(weight, Tensor)
        or not weight.is_floating_point()
        or weight.shape[0] != anatomy.vocab_size
    ):
        raise HeadError(
            f"the target's output projection ({type(anatomy.lm_head).__name__}) has no [vocabulary, hidden] "
            "floating-point weight to learn from"
        )
    return TargetReadout(
        weight.detach(),
        bias.detach() if isinstance(bias, Tensor) else None,
        anatomy.logit_scale,
        anatomy.logit_softcap,
        None if site.norm else anatomy.final_norm,
    )
