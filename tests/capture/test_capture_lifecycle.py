"""A session leaves the model exactly as it found it: after exit, exception, early stop, in any nesting."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transformers import DynamicCache

from capture_hooks import bind
from capture_hooks.capture import find_anatomy
from capture_hooks.errors import BindError, CaptureError
from capture_hooks.testing import tiny

IDS = torch.tensor([[5, 9, 3, 7]])


def everything(model):
    """Hooks, flags and attributes of every module."""
    hooks = (
        "_forward_hooks",
        "_forward_pre_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_pre_hooks_with_kwargs",
    )
    hooks += ("_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks")
    return [
        (name, [list(getattr(module, kind)) for kind in hooks], sorted(vars(module)), module.training)
        for name, module in model.named_modules()
    ]


class Interruption(Exception):  # noqa: N818  # a test's own signal
    pass


class Sessions(RuleBasedStateMachine):
    """Any interleaving of binding, entering, running, failing, stopping and leaving, in any order."""

    def __init__(self):
        super().__init__()
        self.model = tiny.llama(num_hidden_layers=3)
        self.anatomy = find_anatomy(self.model)
        self.foreign = self.model.model.layers[1].register_forward_hook(lambda m, a, o: None)
        self.before = everything(self.model)
        with torch.no_grad():
            self.logits = self.model(IDS).logits
        self.sessions = []

    @rule(spec=st.sampled_from(["embed", "post.0, post.2", "pre.2, final_norm", "out:lm_head", "post.1"]))
    def bind(self, spec):
        if len(self.sessions) < 4:
            self.sessions.append(bind(self.model, spec, target=True, anatomy=self.anatomy))

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def enter_or_leave(self, data):
        session = data.draw(st.sampled_from(self.sessions))
        if session.active:
            session.__exit__(None, None, None)
        else:
            session.__enter__()

    @rule()
    def run(self):
        with torch.no_grad():
            assert torch.equal(self.model(IDS).logits, self.logits)
        for session in self.sessions:
            if session.active:
                assert len(session.states) % IDS.numel() == 0

    @rule(layer=st.integers(0, 2))
    def fail(self, layer):
        def interrupt(module, args, output):
            raise Interruption

        handle = self.model.model.layers[layer].register_forward_hook(interrupt)
        with torch.no_grad(), pytest.raises(Interruption):
            self.model(IDS)
        handle.remove()

    @precondition(lambda self: any(session.active for session in self.sessions))
    @rule(data=st.data())
    def stop(self, data):
        session = data.draw(st.sampled_from([s for s in self.sessions if s.active]))
        with torch.no_grad():
            session.run(IDS, stop=True)
        assert len(session.states) % IDS.numel() == 0

    @rule()
    def leave_by_exception(self):
        session = bind(self.model, "post.1", anatomy=self.anatomy)
        with torch.no_grad(), pytest.raises(Interruption), session:  # noqa: PT012  # leaving is what is tested
            self.model(IDS)
            raise Interruption

    @invariant()
    def nothing_is_left_when_nobody_is_entered(self):
        if not any(session.active for session in self.sessions):
            assert everything(self.model) == self.before

    def teardown(self):
        for session in self.sessions:
            if session.active:
                session.__exit__(None, None, None)
        assert everything(self.model) == self.before


TestSessions = Sessions.TestCase
TestSessions.settings = settings(deadline=None, max_examples=12, stateful_step_count=15)


@pytest.fixture
def model():
    return tiny.llama()


def test_nested_sessions_see_the_same_forward(model):
    with torch.no_grad(), bind(model, "post.1, post.2") as outer, bind(model, "post.2, embed") as inner:
        model(IDS)
    assert torch.equal(outer.states["post.2"], inner.states["post.2"])


def test_an_inner_session_may_come_and_go(model):
    with torch.no_grad(), bind(model, "post.2") as outer:
        model(IDS)
        with bind(model, "post.2") as inner:
            model(IDS)
        model(IDS)
    assert len(outer.states) == 12
    assert len(inner.states) == 4


def test_a_session_is_entered_once_at_a_time(model):
    with bind(model, "post.2") as capture, pytest.raises(BindError, match="already entered"):
        capture.__enter__()
    assert not capture.active


def test_entering_again_starts_afresh(model):
    capture = bind(model, "post.2")
    with torch.no_grad():
        for _ in range(2):
            with capture:
                model(IDS)
            assert capture.states.request.tolist() == [0, 0, 0, 0]


def test_a_forward_that_failed_leaves_no_rows(model):
    def interrupt(module, args, output):
        raise Interruption

    with torch.no_grad(), bind(model, "post.1, post.4") as capture:
        model(IDS)
        handle = model.model.layers[3].register_forward_hook(interrupt)
        with pytest.raises(Interruption):
            model(IDS)
        handle.remove()
        model(IDS)
    assert len(capture.states) == 8
    assert torch.equal(capture.states.packed[:4], capture.states.packed[4:])


def test_an_early_stop_runs_no_layer_after_the_last_point(model):
    ran = []
    handles = [
        layer.register_forward_pre_hook(lambda m, a, k=k: ran.append(k))
        for k, layer in enumerate(model.model.layers)
    ]
    with torch.no_grad():
        with bind(model, "post.2, embed") as whole:
            model(IDS)
        ran.clear()
        with bind(model, "post.2, embed") as stopped:
            assert stopped.run(IDS, stop=True) is None
            assert ran == [0, 1, 2]
            assert stopped.run(IDS) is not None
    for handle in handles:
        handle.remove()
    assert torch.equal(stopped.states.packed[:4], whole.states.packed)
    assert len(stopped.states) == 8


def test_an_outer_session_sees_that_an_inner_one_stopped_the_forward(model):
    with torch.no_grad(), bind(model, "post.4") as outer, bind(model, "post.1") as inner:
        inner.run(IDS, stop=True)
        assert len(inner.states) == 4
        with pytest.raises(CaptureError, match=r"nothing was captured.*post\.4"):
            _ = outer.states


def test_a_forward_that_another_session_stopped_does_not_count(model):
    with torch.no_grad(), bind(model, "post.1") as first, bind(model, "post.4") as second:
        assert first.run(IDS, stop=True) is None
        assert second.run(IDS, stop=True) is None
        assert len(first.states) == len(second.states) == 4


@pytest.mark.parametrize("arguments", [{"use_cache": True}, {"cache": None}, {"past_key_values": None}])
def test_an_early_stop_is_refused_while_a_cache_is_filled(model, arguments):
    cache = DynamicCache(config=model.config)
    arguments = {name: cache if value is None else value for name, value in arguments.items()}
    with torch.no_grad(), bind(model, "post.1") as capture:
        with pytest.raises(
            CaptureError, match=r"stop=True with .* would leave the KV cache filled in some layers"
        ):
            capture.run(IDS, stop=True, **arguments)
        with pytest.raises(CaptureError, match="argument 1"):
            capture.run(IDS, cache, stop=True)
    assert cache.get_seq_length() == 0


def test_an_early_stop_makes_no_cache(model):
    seen = []
    model.model.layers[0].register_forward_pre_hook(
        lambda m, a, kwargs: seen.append(kwargs), with_kwargs=True
    )
    with torch.no_grad(), bind(model, "post.1") as capture:
        capture.run(IDS, stop=True)
    assert all(kwargs.get("cache", kwargs.get("past_key_values")) is None for kwargs in seen)


def test_run_needs_an_entered_session(model):
    with pytest.raises(CaptureError, match="only while the session is entered"):
        bind(model, "post.1").run(IDS)
