"""A tiny target, heads for it, and its witness."""

import pytest
import torch

from capture_hooks.capture import find_anatomy
from capture_hooks.heads import make_witness, readout_of
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec
from capture_hooks.testing import tiny

LAYERS = 8
SEQUENCES = [[(7 * i * i + 3 * i + s) % 250 for i in range(20)] for s in range(4)]


@pytest.fixture(scope="session")
def target():
    return tiny.llama(num_hidden_layers=LAYERS)


@pytest.fixture(scope="session")
def witness_of():
    """A witness for a spec, made once for each model and spec."""
    made = {}

    def witness_of(model, spec):
        key = (id(model), str(spec))
        if key not in made:
            made[key] = (model, make_witness(model, spec, SEQUENCES))
        return made[key][1]

    return witness_of


@pytest.fixture(scope="session")
def make_head():
    """An eagle3 head for a model and a spec, every weight random, in eval mode."""

    def make_head(model, spec, *, seed=0, draft=40, **settings):
        provider = registry().heads["eagle3"]
        anatomy = find_anatomy(model)
        spec = CaptureSpec.parse(spec) if isinstance(spec, str) else spec
        ids = torch.arange(anatomy.vocab_size)
        if draft < anatomy.vocab_size:
            ids = ids[torch.randperm(len(ids), generator=torch.manual_seed(seed))[:draft]].sort().values
        config = provider.config_type(**settings)
        head = provider.create(config, spec, anatomy, readout_of(anatomy, spec), ids)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            tiny.randomise(head)
        return head.eval()

    return make_head
