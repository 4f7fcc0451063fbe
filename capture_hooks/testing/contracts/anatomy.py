"""The contract of an `AnatomyProvider`: it finds the right parts, and changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from ...capture.anatomy import Anatomy, AnatomyProvider
    from ...spec import Point


class AnatomyContract:
    """Subclass and override `provider` and `model`, and `run` where a model takes more than token ids.

    For models of the *plain* layout: a layer's first argument and first output are the residual stream.
    """

    def provider(self) -> AnatomyProvider:
        """The provider under test."""
        raise NotImplementedError

    def model(self) -> nn.Module:
        """A small random model that the provider knows, float32, in eval mode; built afresh for each test."""
        raise NotImplementedError

    def run(self, model: nn.Module) -> Any:
        """Call ``model`` once on a few tokens, without a cache; its output has ``logits`` [B, T, V]."""
        import torch

        return model(input_ids=torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]]), use_cache=False)

    def test_it_knows_its_models_and_no_others(self) -> None:
        """A score is how specifically the provider knows a model; a stranger is an error, never a guess."""
        import pytest
        from torch import nn

        from ...errors import BindError

        provider, stranger = self.provider(), nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        assert provider.name
        assert provider.match(self.model()) > 0
        assert provider.match(stranger) == 0
        assert list(provider.unwrap(stranger)) == []
        with pytest.raises(BindError, match=r"."):
            provider.describe(stranger)

    def test_names_lead_to_the_parts(self) -> None:
        """Each name is the part's qualified name inside ``anatomy.model``, and no layer appears twice."""
        anatomy = self._anatomy(self.model())
        found = anatomy.model.get_submodule
        assert found(anatomy.decoder_name) is anatomy.decoder
        assert len(anatomy.layers) == len(anatomy.layer_names) == len(set(map(id, anatomy.layers))) > 0
        for layer, name in zip(anatomy.layers, anatomy.layer_names, strict=True):
            assert found(name) is layer, f"{name} is not layer {anatomy.layer_names.index(name)}"
        assert (anatomy.final_norm is None) == (anatomy.final_norm_name is None)
        if anatomy.final_norm_name is not None:
            assert found(anatomy.final_norm_name) is anatomy.final_norm
        inside = set(map(id, anatomy.model.modules()))
        assert {id(anatomy.embedding), id(anatomy.lm_head)} <= inside

    def test_every_part_is_what_it_claims(self) -> None:
        """Replayed by hand from any boundary, also a disturbed one, the parts give the model's own logits."""
        from ..anatomy_check import check_anatomy

        model = self.model()
        stream = check_anatomy(self._anatomy(model), lambda: self.run(model))
        assert stream.logits.isfinite().all()

    def test_captured_states_are_the_boundaries(self) -> None:
        """What a session captures at every point is what enters and leaves the layers."""
        import torch

        from ...capture import bind
        from ...spec import CaptureSpec
        from ..anatomy_check import check_anatomy

        model = self.model()
        anatomy = self._anatomy(model)
        stream = check_anatomy(anatomy, lambda: self.run(model))
        for point in self._points(anatomy):
            with torch.no_grad(), bind(model, CaptureSpec((point,)), anatomy=anatomy) as capture:
                self.run(model)
            boundary = point.resolve(anatomy.n_layers, anatomy.split_boundaries).boundary
            assert boundary is not None
            entering = point.kind != "post"
            expected = stream.boundaries[boundary] if entering else stream.outputs[boundary - 1]
            captured = capture.states[point].reshape(expected.shape)
            assert torch.equal(captured, expected), f"{point} is not what the layers pass on"

    def test_describing_and_capturing_leave_the_model_as_it_was(self) -> None:
        """No hook, no flag, no weight and no attribute of any module changes."""
        import torch

        from ...capture import bind

        model = self.model()
        with torch.no_grad():
            before, logits = _everything(model), self.run(model).logits
            anatomy = self._anatomy(model)
            assert _everything(model) == before, "describe changed the model"
            with bind(model, "post.0", anatomy=anatomy):
                self.run(model)
            assert _everything(model) == before, "a session left something behind"
            assert torch.equal(self.run(model).logits, logits)

    def _anatomy(self, model: nn.Module) -> Anatomy:
        return self.provider().describe(model)

    @staticmethod
    def _points(anatomy: Anatomy) -> list[Point]:
        from ...spec import Point

        return [
            Point("embed"),
            *(make(k) for k in range(anatomy.n_layers) for make in (Point.pre, Point.post)),
        ]


def _everything(model: nn.Module) -> list[object]:
    """Each module with its attributes, hooks and training flag; each tensor with its identity and content."""
    found: list[object] = []
    for name, module in model.named_modules():
        hooks = {
            key: len(value)
            for key, value in vars(module).items()
            if key.endswith("_hooks") and value is not None
        }
        found.append((name, id(module), module.training, hooks, sorted(vars(module))))
        found.append(vars(module).get("forward"))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found.append((name, id(tensor), tensor.requires_grad, tensor.double().sum().item()))
    return found
