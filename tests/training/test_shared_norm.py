"""A target that calls one norm at both ends of its stack (NanoChat): the end's call is the final norm."""

import pytest
import torch

from capture_hooks.capture import bind, find_anatomy
from capture_hooks.decoding import SpeculativeDecoder
from capture_hooks.errors import CaptureError
from capture_hooks.heads import load_head
from capture_hooks.spec import CaptureSpec
from capture_hooks.store import Dump, Example, Examples, ModelStates, write_dump
from capture_hooks.testing import tiny
from capture_hooks.training import TrainConfig, train

SPEC = "embed, post.0, post.1"
IDS = torch.randint(3, 250, (2, 9), generator=torch.manual_seed(0))


@pytest.fixture(scope="module")
def model():
    return tiny.model("nanochat", num_hidden_layers=2)


def own_final_norm(model, **inputs):
    """What lm_head is fed, by its own hook."""
    seen = []
    hook = model.lm_head.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("stop", [False, True])
def test_it_is_captured_in_every_kind_of_forward(model, stop):
    expected = own_final_norm(model, input_ids=IDS)
    with torch.no_grad(), bind(model, "final_norm, post.0") as capture:
        for _ in range(2):
            capture.run(input_ids=IDS, stop=stop)
    states = capture.states["final_norm"].view(2, *IDS.shape, -1)
    assert torch.equal(states[0], expected)
    assert torch.equal(states[1], expected)
    with torch.no_grad(), bind(model, "final_norm", out=torch.zeros(18, tiny.HIDDEN)) as capture:
        model(input_ids=IDS)
    assert torch.equal(capture.states["final_norm"].view_as(expected), expected)
    with torch.no_grad(), bind(model, "final_norm") as capture:
        answer = model.generate(input_ids=IDS[:1], do_sample=False, max_new_tokens=5)
    whole = own_final_norm(model, input_ids=answer[:, :-1])
    torch.testing.assert_close(capture.states["final_norm"], whole[0])


def test_a_forward_that_fails_half_way_does_not_shift_the_next(model):
    expected = own_final_norm(model, input_ids=IDS)

    def fail(*_):
        raise RuntimeError("half-way")

    with torch.no_grad(), bind(model, "final_norm") as capture:
        hook = model.model.layers[0].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="half-way"):
            model(input_ids=IDS)
        hook.remove()
        model(input_ids=IDS)
    assert torch.equal(capture.states["final_norm"].view_as(expected), expected)


def test_the_module_as_such_still_has_no_single_meaning(model):
    with (
        torch.no_grad(),
        pytest.raises(CaptureError, match="fired twice in one forward"),
        bind(model, "out:model.norm"),
    ):
        model(input_ids=IDS)


@pytest.mark.parametrize("online", [False, True])
def test_a_head_is_trained_and_drafts(tmp_path, model, online):
    rows = torch.randint(3, 250, (6, 12), generator=torch.manual_seed(1))
    examples = Examples("random", tuple(Example(ids, torch.arange(12) >= 3, "an example") for ids in rows))
    data = examples
    if not online:
        write_dump(ModelStates(model, CaptureSpec.parse(SPEC), examples), tmp_path / "dump")
        data = Dump.open(tmp_path / "dump")
    config = TrainConfig(spec=SPEC, steps=3, evaluations=0, save_minutes=1000)
    train(model, data, config, out=tmp_path / "head")
    head = load_head(tmp_path / "head", model)
    expected = model.generate(IDS[:1], do_sample=False, max_new_tokens=20)
    answer = SpeculativeDecoder(model, head, 3).generate(IDS[0], 20, do_sample=False)
    assert torch.equal(answer.sequences, expected)
    assert find_anatomy(model).final_norm_call == 1
