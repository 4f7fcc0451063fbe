"""A published head, in any library's layout, is fine-tuned."""

import pytest
import torch

from capture_hooks.capture import find_anatomy
from capture_hooks.errors import HeadError, TrainingError
from capture_hooks.heads import HeadWarning, load_head, make_witness, readout_of, save_head
from capture_hooks.heads.contract import TrainBatch
from capture_hooks.interop.heads import FORMATS, TargetShape, convert_head
from capture_hooks.plugins import registry
from capture_hooks.spec import CaptureSpec
from capture_hooks.store import Dump, Example, Examples, ModelStates, write_dump
from capture_hooks.testing import tiny
from capture_hooks.training import TrainConfig, build, train
from capture_hooks.training.data import pack

SPEC = CaptureSpec.parse("post.1, post.3, post.5")
#: The same states, in the order of the dump.
SHUFFLED = CaptureSpec.parse("post.5, post.1, pre.4")

pytestmark = pytest.mark.filterwarnings("ignore::capture_hooks.heads.HeadWarning")


@pytest.fixture(scope="module")
def target():
    return tiny.llama(num_hidden_layers=8)


@pytest.fixture(scope="module")
def examples():
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(tiny.VOCAB, (n,), generator=generator) for n in (30, 21, 40, 17, 33, 26)]
    return Examples("random", tuple(Example(x, torch.arange(len(x)) >= 3, f"{i}") for i, x in enumerate(ids)))


@pytest.fixture(scope="module")
def dump(target, examples, tmp_path_factory):
    place = tmp_path_factory.mktemp("dumps") / "dump"
    write_dump(ModelStates(target, SHUFFLED, examples), place)
    return Dump.open(place)


@pytest.fixture(scope="module")
def published(target, tmp_path_factory):
    """A head with EAGLE-3.1's norms, in every layout, and the head itself."""
    root = tmp_path_factory.mktemp("heads")
    anatomy, provider = find_anatomy(target), registry().heads["eagle3"]
    config = provider.config_type(fc_norm=True, norm_output=True, steps=3, feature_noise=0.0)
    ids = torch.arange(0, anatomy.vocab_size, 3)
    head = provider.create(config, SPEC, anatomy, readout_of(anatomy, SPEC), ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        tiny.randomise(head)
    sequences = [[(7 * i * i + 3 * i + s) % 250 for i in range(20)] for s in range(4)]
    save_head(head, root / "capture-hooks", model=target, witness=make_witness(target, SPEC, sequences))
    for layout in ("eagle", "modelopt", "speculators"):
        convert_head(root / "capture-hooks", root / layout, to=layout, target=TargetShape.of_anatomy(anatomy))
    return root


WRITTEN_FOR = {"eagle": "sglang", "modelopt": "modelopt", "speculators": None, "capture-hooks": None}


def config(published, layout, **changed):
    settings = {
        "init_from": str(published / layout),
        "written_for": WRITTEN_FOR[layout],
        "steps": 4,
        "batch_tokens": 120,
        "held_out": 0.0,
        "lr": 1e-3,
        "warmup": 0.0,
    }
    if layout != "capture-hooks":
        settings["head_config"] = {"steps": 3, "feature_noise": 0.0}
    return TrainConfig(**(settings | changed))


def prepare(target, data, config):
    return build.prepare(target, data, config, formats=FORMATS)


def loss(head, batch):
    with torch.no_grad():
        return head.eval()(batch).mean()


@pytest.mark.parametrize("layout", WRITTEN_FOR)
def test_its_first_loss_is_the_heads_own(target, dump, examples, published, layout):
    """The dump's states lie in another order, and calibration rescales them; neither changes a thing."""
    setup = prepare(target, dump, config(published, layout))
    assert setup.head.spec == SHUFFLED
    own = load_head(published / "capture-hooks", target)
    assert own.spec == SPEC
    batch = pack([setup.train[i] for i in range(len(setup.train.pieces))])
    last, first, middle = batch["states"].chunk(3, -1)

    def of(states):
        return TrainBatch(**{**batch, "states": states})

    wanted = loss(own, of(torch.cat([first, middle, last], -1)))
    assert float(loss(setup.head, of(batch["states"]))) == pytest.approx(float(wanted), rel=1e-5)


@pytest.mark.parametrize("layout", WRITTEN_FOR)
def test_the_dump_says_which_point_is_learnt(target, examples, dump, published, layout, tmp_path):
    """speculators and ModelOpt dump the last state before the final norm; the readout norms it."""
    unnormed = CaptureSpec(SHUFFLED.inputs, CaptureSpec.parse("embed -> post.7").target)
    write_dump(ModelStates(target, unnormed, examples), tmp_path / "dump")
    setups = [
        prepare(target, data, config(published, layout)) for data in (dump, Dump.open(tmp_path / "dump"))
    ]
    assert setups[1].head.spec == unnormed
    losses = [
        loss(s.head, TrainBatch(**pack([s.train[i] for i in range(len(s.train.pieces))]))) for s in setups
    ]
    assert float(losses[1]) == pytest.approx(float(losses[0]), rel=1e-5)
    asked = str(CaptureSpec(SPEC.inputs, unnormed.target))
    if layout == "eagle":
        chosen = config(published, layout, written_for=None, spec=asked)
        assert prepare(target, examples, chosen).head.spec == CaptureSpec.parse(asked)
        with pytest.raises(TrainingError, match=r"learn from final_norm, but post\.7 was asked for"):
            prepare(target, dump, chosen)
    train(
        target,
        Dump.open(tmp_path / "dump"),
        config(published, layout),
        out=tmp_path / "head",
        formats=FORMATS,
    )
    assert load_head(tmp_path / "head", target).spec == unnormed


@pytest.mark.parametrize("settings", [{"init_layer": -1}, {"lm_head_init": "random"}, {"norm_init": 0.3}])
def test_weights_start_from_one_place(published, settings):
    with pytest.raises(TrainingError, match=f"{next(iter(settings))}.*would start from the file"):
        config(published, "eagle", head_config=settings)


def test_a_speculators_head_is_fine_tuned(target, dump, published, tmp_path):
    settings = {"steps": 3, "feature_noise": 0.0, "train_lm_head": True}
    tuned = config(published, "speculators", steps=30, lr=1e-2, head_config=settings)
    head = train(target, dump, tuned, out=tmp_path / "head", formats=FORMATS)
    saved = load_head(tmp_path / "head", target)
    assert saved.spec == SHUFFLED
    assert saved.config.fc_norm
    assert saved.config.norm_output
    assert torch.equal(saved.draft_token_ids, head.draft_token_ids)
    setup = prepare(target, dump, config(published, "speculators"))
    batch = TrainBatch(**pack([setup.train[i] for i in range(len(setup.train.pieces))]))
    # Most of the loss is the entropy of a random target, which no head can go below.
    assert float(loss(saved, batch)) < float(loss(setup.head, batch)) - 0.3


def test_live_capture_takes_the_heads_own_order(target, examples, published):
    setup = prepare(target, examples, config(published, "modelopt"))
    assert setup.head.spec == SPEC
    with pytest.warns(HeadWarning, match="taken on trust"):
        setup = prepare(target, examples, config(published, "eagle", written_for=None, spec=str(SPEC)))
    assert setup.head.spec == SPEC


def test_what_does_not_fit_is_named(target, dump, examples, published, tmp_path):
    with pytest.raises(HeadError, match="layer ids alone do not say which states they mean"):
        prepare(target, dump, config(published, "eagle", written_for=None))
    with pytest.raises(HeadError, match=r"mean post\.1, post\.3, post\.5, and the spec given is"):
        prepare(target, examples, config(published, "eagle", spec="post.1, post.2, post.5"))
    other = tmp_path / "other"
    write_dump(ModelStates(target, CaptureSpec.parse("post.1, post.2, post.5"), examples), other)
    with pytest.raises(HeadError, match="these are other states"):
        prepare(target, Dump.open(other), config(published, "speculators"))
    with pytest.raises(HeadError, match=r"unknown settings \['norm_output'\]"):
        prepare(target, dump, config(published, "speculators", head_config={"norm_output": False}))
    with pytest.raises(TrainingError, match="a draft vocabulary of 11 was asked for"):
        prepare(target, dump, config(published, "speculators", draft_vocab=11))
    with pytest.raises(TrainingError, match="keeps its own settings"):
        prepare(target, dump, config(published, "capture-hooks", head_config={"steps": 2}))
