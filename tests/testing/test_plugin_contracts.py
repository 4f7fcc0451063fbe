"""The contract tests on this project's own plugins, as another author would run them on theirs."""

from typing import Any

import pytest
from torch import nn

from capture_hooks.capture import AnatomyProvider
from capture_hooks.heads import HeadProvider
from capture_hooks.plugins import Registry
from capture_hooks.testing import tiny
from capture_hooks.testing.contracts import AnatomyContract, StepwiseHeadContract


class TestTransformersAnatomy(AnatomyContract):
    @pytest.fixture(autouse=True, params=["llama", "gpt2", "gemma2"])
    def _installed(self, capture_registry: Registry, request: pytest.FixtureRequest) -> None:
        self.found = capture_registry.anatomies["transformers"]
        self.family = request.param

    def provider(self) -> AnatomyProvider:
        return self.found

    def model(self) -> nn.Module:
        return tiny.model(self.family)


class TestEagle3Head(StepwiseHeadContract):
    @pytest.fixture(
        autouse=True,
        params=[
            {},
            {"layers": 2, "norm_before_residual": True},
            {"fc_norm": True, "norm_output": True, "train_lm_head": True, "outside": "renormalise"},
        ],
        ids=["plain", "two-layers", "3.1"],
    )
    def _installed(self, capture_registry: Registry, request: pytest.FixtureRequest) -> None:
        self.found = capture_registry.heads["eagle3"]
        self.settings = request.param

    def provider(self) -> HeadProvider:
        return self.found

    def config(self) -> Any:
        return self.found.config_type(**self.settings)
