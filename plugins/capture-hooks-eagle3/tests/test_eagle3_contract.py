"""The project's own contract tests, for the head as it comes and with its options."""

from __future__ import annotations

from capture_hooks_eagle3 import Eagle3Config
from capture_hooks_eagle3.provider import Eagle3Provider

from capture_hooks.testing.contracts import StepwiseHeadContract


class TestEagle3(StepwiseHeadContract):
    """One layer, every default."""

    def provider(self) -> Eagle3Provider:
        return Eagle3Provider()


class TestEagle31(TestEagle3):
    """EAGLE-3.1: per-input norms and normed feedback; two layers; everything trained."""

    def config(self) -> Eagle3Config:
        return Eagle3Config(
            layers=2,
            fc_norm=True,
            norm_output=True,
            norm_before_residual=True,
            train_lm_head=True,
            train_embedding=True,
        )


class TestNormBeforeFc(TestEagle3):
    """One norm over all inputs; rows outside the draft vocabulary teach; from a target layer."""

    def config(self) -> Eagle3Config:
        return Eagle3Config(norm_before_fc=True, outside="renormalise", steps=2, init_layer=-1)
