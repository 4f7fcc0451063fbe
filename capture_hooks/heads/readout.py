"""How a target's states become its logits, for the point whose logits a head learns."""

from __future__ import annotations

from ..capture.anatomy import Anatomy
from ..capture.weights import projection
from ..errors import BindError, HeadError
from ..spec import CaptureSpec
from .contract import TargetReadout


def readout_of(anatomy: Anatomy, spec: CaptureSpec) -> TargetReadout:
    """The readout of ``spec.target``: ``final_norm``, or the un-normed end of the stream.

    Raises:
        HeadError: the target point is neither, ``lm_head`` is no matrix product (see
            `capture_hooks.capture.weights`), or the model does more than project, scale and cap.
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
    try:
        weight, bias = projection(anatomy.lm_head, anatomy.hidden_size)
    except BindError as error:
        raise HeadError(
            f"no head can learn from {type(anatomy.model).__name__}'s output projection: {error}"
        ) from None
    if weight.shape[0] != anatomy.vocab_size:
        raise HeadError(
            f"the target's output projection has {weight.shape[0]} rows, its vocabulary {anatomy.vocab_size}"
        )
    return TargetReadout(
        weight,
        bias,
        anatomy.logit_scale,
        anatomy.logit_softcap,
        None if site.norm else anatomy.final_norm,
    )
