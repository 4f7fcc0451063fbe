"""The contract tests themselves: right implementations pass, each wrong one is caught."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from capture_hooks import Point
from capture_hooks.capture import Anatomy, AnatomyProvider
from capture_hooks.conventions import Convention
from capture_hooks.conventions.rules import Vllm
from capture_hooks.heads import DraftHead, HeadProvider
from capture_hooks.plugins import Registry, build_registry
from capture_hooks.testing import tiny
from capture_hooks.testing.contracts import AnatomyContract, ConventionContract, StepwiseHeadContract

CONVENTIONS = build_registry(entry_points=()).conventions


@pytest.fixture(params=sorted(CONVENTIONS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestConventions(ConventionContract):
    @pytest.fixture(autouse=True)
    def _each(self, name: str) -> None:
        self.convention = CONVENTIONS[name]


def passes(contract: object, *arguments: object) -> bool:
    """Whether every test of the contract passes."""
    for name in [name for name in dir(contract) if name.startswith("test_")]:
        test = getattr(contract, name)
        takes = test.__code__.co_argcount - 1
        try:
            test(*arguments[:takes])
        except Exception:  # an assertion, or any error the wrong implementation provokes
            return False
    return True


RIGHT = {field.name: getattr(CONVENTIONS["vllm"], field.name) for field in dataclasses.fields(Vllm)}


class OffByOne(Vllm):
    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        return [max(k - 1, 0) for k in super().from_points(points, n_layers)]


class Sorting(Vllm):
    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        return sorted(Vllm.from_points(dataclasses.replace(self, order="listed"), points, n_layers))


class Dropping(Vllm):
    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        return super().to_points([k for k in ids if k <= n_layers] or [0], n_layers)


class Wrapping(Vllm):
    def to_points(self, ids: Sequence[int], n_layers: int) -> tuple[Point, ...]:
        return super().to_points([k % (n_layers + 1) for k in ids], n_layers)


class Literal(Vllm):
    def from_points(self, points: Sequence[Point], n_layers: int) -> list[int]:
        return super().from_points([p for p in points if p.kind != "post"], n_layers)


def silent(**fields: Any) -> Convention:
    return Vllm(**{**fields, "limits": ""})


@pytest.mark.parametrize("wrong", [OffByOne, Sorting, Dropping, Wrapping, Literal, silent])
def test_a_wrong_convention_is_caught(wrong: Callable[..., Convention]) -> None:
    contract = ConventionContract()
    contract.convention = Vllm(**RIGHT)
    assert passes(contract)
    contract.convention = wrong(**RIGHT)
    assert not passes(contract)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a: dataclasses.replace(a, layers=a.layers[::-1], layer_names=a.layer_names[::-1]),
        lambda a: dataclasses.replace(a, layers=a.layers[:-1], layer_names=a.layer_names[:-1]),
        lambda a: dataclasses.replace(a, layer_names=a.layer_names[::-1]),
        lambda a: dataclasses.replace(a, final_norm=a.layers[0].input_layernorm),
        lambda a: dataclasses.replace(a, final_norm=None, final_norm_name=None),
        lambda a: dataclasses.replace(a, logit_scale=2.0),
        lambda a: dataclasses.replace(a, logit_softcap=1.0),
    ],
    ids=["reversed", "too-few", "names", "other-norm", "no-norm", "scale", "softcap"],
)
def test_a_wrong_anatomy_is_caught(wrong: Callable[[Anatomy], Anatomy], capture_registry: Registry) -> None:
    right = capture_registry.anatomies["transformers"]

    class Wrong:
        name = right.name
        match = staticmethod(right.match)
        unwrap = staticmethod(right.unwrap)

        @staticmethod
        def describe(model: nn.Module) -> Anatomy:
            return wrong(right.describe(model))

    class Contract(AnatomyContract):
        def provider(self) -> AnatomyProvider:
            return Wrong()

        def model(self) -> nn.Module:
            return tiny.llama()

    assert not passes(Contract())


def other_extend(head: Any) -> None:
    extend = head.extend
    head.extend = lambda cache, states, ids, start: extend(cache, states, ids.roll(1), start)


def other_positions(head: Any) -> None:
    step = head.step

    def wrong(
        cache: Any, hidden: Tensor, ids: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return step(cache, hidden, ids, positions + 1, mask)

    head.step = wrong


def other_size(head: Any) -> None:
    step = head.step

    def wrong(
        cache: Any, hidden: Tensor, ids: Tensor, positions: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        return step(cache, hidden * 1.5, ids, positions, mask)

    head.step = wrong


def no_mask(head: Any) -> None:
    step = head.step
    head.step = lambda cache, hidden, ids, positions, mask=None: step(cache, hidden, ids, positions)


def order_ignored(head: Any) -> None:
    export = head.export
    head.export = lambda order: export(range(len(order)))


def infinite(head: DraftHead) -> None:
    head.register_forward_hook(lambda module, args, sums: dataclasses.replace(sums, loss=sums.loss / 0))


@pytest.mark.parametrize(
    "wrong", [other_extend, other_positions, other_size, no_mask, order_ignored, infinite]
)
def test_a_wrong_head_is_caught(
    wrong: Callable[[DraftHead], None], capture_registry: Registry, tmp_path: Path
) -> None:
    right = capture_registry.heads["eagle3"]

    class Wrong:
        name = right.name
        config_type = right.config_type
        schema = right.schema
        restore = staticmethod(right.restore)

        @staticmethod
        def create(*arguments: Any) -> DraftHead:
            head = right.create(*arguments)
            wrong(head)
            return head

    class Contract(StepwiseHeadContract):
        def provider(self) -> HeadProvider:
            return Wrong()

    assert not passes(Contract(), tmp_path)


def test_importing_the_contracts_imports_no_torch() -> None:
    code = "import sys, capture_hooks.testing.contracts; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
