"""Dumping a model: right states, right tokens, whatever the batching; killed and resumed; refused."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from capture_hooks import CaptureSpec
from capture_hooks.errors import BindError, DataError, SpecError, StoreError
from capture_hooks.store import Dump, Example, Examples, ModelStates, estimate, write_dump
from capture_hooks.store.model import plan_batches
from capture_hooks.testing import tiny

SPEC = CaptureSpec.parse("post.0, embed, post.3")
MODEL = tiny.llama()


def make_examples(lengths, seed=0, vocab=MODEL.config.vocab_size):
    source = torch.Generator().manual_seed(seed)
    return Examples(
        "made up",
        tuple(
            Example(
                torch.randint(vocab, (length,), generator=source),
                torch.arange(length) >= length // 2,
                f"here:{at}",
            )
            for at, length in enumerate(lengths)
        ),
    )


def reference(model, tokens):
    """Embedding, the first and fourth layer's output, final norm and logits, from one sequence alone."""
    with torch.inference_mode():
        read = model(tokens[None], output_hidden_states=True)
    hidden = [state[0] for state in read.hidden_states]
    return torch.cat([hidden[1], hidden[0], hidden[4]], -1), hidden[-1], read.logits[0]


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=9),
    shard_tokens=st.integers(1, 60),
    batch_tokens=st.integers(1, 60),
)
def test_every_row_equals_the_sequence_run_alone(tmp_path_factory, lengths, shard_tokens, batch_tokens):
    model, examples = MODEL.double(), make_examples(lengths)
    try:
        directory = tmp_path_factory.mktemp("dump") / "d"
        manifest = write_dump(
            ModelStates(
                model, SPEC, examples, dtype="float32", shard_tokens=shard_tokens, batch_tokens=batch_tokens
            ),
            directory,
        )
        dump = Dump.open(directory, SPEC, verify=True)
        assert len(dump) == len(lengths) == manifest.sequences
        for stored, example in zip(dump, examples, strict=True):
            states, final, logits = reference(model, example.token_ids)
            # float64 inside, so batches and padding change nothing that float32 could show
            torch.testing.assert_close(stored.states, states.float(), rtol=2e-7, atol=1e-7)
            torch.testing.assert_close(stored.target, final.float(), rtol=2e-7, atol=1e-7)
            assert torch.equal(stored.argmax, logits.argmax(-1))
            assert torch.equal(stored.token_ids, example.token_ids)
            assert torch.equal(stored.loss_mask, example.loss_mask)
    finally:
        MODEL.float()


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    batch_tokens=st.integers(1, 90),
)
def test_batches_partition_a_shard_within_the_limit(lengths, batch_tokens):
    batches = plan_batches(lengths, range(len(lengths)), batch_tokens)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        longest = max(lengths[i] for i in batch)
        assert lengths[batch[0]] == longest
        assert len(batch) == 1 or len(batch) * longest <= batch_tokens


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "cohere", "opt", "bloom", "gpt_neox", "mixtral"])
def test_families_with_their_own_output_layers(tmp_path, family):
    if family not in tiny.families():
        pytest.skip(f"no tiny {family}")
    model = tiny.model(family)
    examples = make_examples([9, 4], vocab=model.config.vocab_size)
    write_dump(ModelStates(model, CaptureSpec.parse("post.1, post.0"), examples), tmp_path / "d")
    for stored, example in zip(Dump.open(tmp_path / "d"), examples, strict=True):
        with torch.inference_mode():
            read = model(example.token_ids[None], output_hidden_states=True)
        # A batch rounds otherwise than a sequence alone; the float64 test above shows the rows are right.
        torch.testing.assert_close(stored.states[:, : stored.target.shape[1]], read.hidden_states[2][0])
        torch.testing.assert_close(stored.target, read.hidden_states[-1][0])
        chosen = read.logits[0].gather(-1, stored.argmax[:, None])[:, 0]
        torch.testing.assert_close(chosen, read.logits[0].max(-1).values)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        # get_decoder() is the whole model
        ("llama4_text", {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 8}),
        # its output projection takes another width than the stream's
        ("rembert", {"is_decoder": True, "input_embedding_size": 16, "output_embedding_size": 40}),
        # a head of several layers
        ("bert", {"is_decoder": True}),
    ],
)
def test_models_whose_readout_lies_outside_the_decoder(tmp_path, family, settings):
    sizes = {"vocab_size": tiny.VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = AutoConfig.for_model(family, **sizes, **heads, **settings, pad_token_id=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        tiny.randomise(model)
    examples = make_examples([9, 4, 17])
    write_dump(ModelStates(model, CaptureSpec.parse("post.1, post.0 -> post.2"), examples), tmp_path / "d")
    for stored, example in zip(Dump.open(tmp_path / "d"), examples, strict=True):
        with torch.inference_mode():
            read = model(example.token_ids[None], output_hidden_states=True, use_cache=False)
        torch.testing.assert_close(stored.states[:, :32], read.hidden_states[2][0], rtol=1e-4, atol=1e-4)
        chosen = read.logits[0].gather(-1, stored.argmax[:, None])[:, 0]
        torch.testing.assert_close(chosen, read.logits[0].max(-1).values)


def test_a_target_other_than_the_final_norm(tmp_path):
    examples = make_examples([9, 4])
    spec = CaptureSpec.parse("post.0, post.-1 -> post.-1")
    manifest = write_dump(ModelStates(MODEL, spec, examples), tmp_path / "d")
    assert manifest.target_input == 1
    assert not manifest.target_normed
    stored = Dump.open(tmp_path / "d")[0]
    normed = MODEL.model.norm(stored.target)
    assert torch.equal(MODEL.lm_head(normed).argmax(-1), stored.argmax)


def test_module_points_may_differ_in_width(tmp_path):
    spec = CaptureSpec.parse("post.0, out:model.layers.1.mlp.up_proj, in:lm_head")
    manifest = write_dump(ModelStates(MODEL, spec, make_examples([9, 4])), tmp_path / "d")
    hidden, wide = MODEL.config.hidden_size, MODEL.config.intermediate_size
    assert manifest.widths == (hidden, wide, hidden)
    stored = Dump.open(tmp_path / "d")[1]
    assert stored.states.shape == (4, 2 * hidden + wide)
    assert torch.equal(stored.states[:, -hidden:], stored.target)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrower_dtype_is_the_float32_dump_rounded(tmp_path, dtype):
    examples = make_examples([9, 4, 13])
    write_dump(ModelStates(MODEL, SPEC, examples), tmp_path / "wide")
    write_dump(ModelStates(MODEL, SPEC, examples, dtype=dtype), tmp_path / "narrow")
    for wide, narrow in zip(Dump.open(tmp_path / "wide"), Dump.open(tmp_path / "narrow"), strict=True):
        assert torch.equal(wide.states.to(getattr(torch, dtype)), narrow.states)
        assert torch.equal(wide.argmax, narrow.argmax)


def test_the_model_is_left_as_it_was(tmp_path):
    model = tiny.llama()
    write_dump(ModelStates(model, SPEC, make_examples([5])), tmp_path / "d")
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def poisoned(value):
    """A model whose embedding of token 7 is ``value`` throughout."""
    model = tiny.llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = value
    return model


@pytest.mark.parametrize(("value", "word"), [(float("nan"), "nan"), (float("inf"), "inf")])
def test_a_state_that_is_no_number_names_point_conversation_and_position(tmp_path, value, word):
    examples = make_examples([5, 6, 7], vocab=6)
    examples[1].token_ids[3] = 7
    with pytest.raises(StoreError) as caught:
        write_dump(ModelStates(poisoned(value), SPEC, examples, shard_tokens=12), tmp_path / "d")
    message = str(caught.value)
    assert "in conversation 1 (here:1) at position 3, column" in message
    assert message.startswith(f"embed is {word} in float32")
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["manifest.json"]


def test_float16_overflow_is_an_error_and_not_infinity(tmp_path):
    examples = make_examples([5, 6], vocab=6)
    examples[1].token_ids[2] = 7
    model = poisoned(1e6)
    spec = CaptureSpec.parse("embed, post.0")
    with pytest.raises(StoreError, match=r"embed is inf in float16 in conversation 1 .*position 2.*65504"):
        write_dump(ModelStates(model, spec, examples, dtype="float16"), tmp_path / "d")
    write_dump(ModelStates(model, spec, examples, dtype="bfloat16"), tmp_path / "e")
    assert torch.isfinite(Dump.open(tmp_path / "e")[1].states).all()


def test_requests_that_do_not_fit_the_model(tmp_path):
    with pytest.raises(SpecError, match="outside a model of 6 layers"):
        ModelStates(MODEL, CaptureSpec.parse("post.6"), make_examples([4]))
    with pytest.raises(BindError, match=r"no module 'model.layers.9'"):
        ModelStates(MODEL, CaptureSpec.parse("out:model.layers.9"), make_examples([4]))
    with pytest.raises(DataError, match=r"here:0: token ids from .* do not fit the model's vocabulary"):
        ModelStates(MODEL, SPEC, make_examples([4], vocab=10_000))
    long = MODEL.config.max_position_embeddings + 1
    with pytest.raises(
        DataError, match=rf"here:1: {long} tokens, but the model's context ends at {long - 1}"
    ):
        ModelStates(MODEL, SPEC, make_examples([4, long]))
    with pytest.raises(StoreError, match="states cannot be stored as int8"):
        ModelStates(MODEL, SPEC, make_examples([4]), dtype="int8")
    with pytest.raises(StoreError, match=r"training mode"):
        ModelStates(tiny.llama().train(), SPEC, make_examples([4]))


def test_a_model_that_does_not_run_is_named():
    """transformers' Mamba multiplies float32 by bfloat16 on a CPU."""
    model = tiny.model("mamba").to(torch.bfloat16)
    with pytest.raises(StoreError, match=r"MambaForCausalLM cannot read \d+ tokens on cpu: RuntimeError"):
        ModelStates(model, CaptureSpec.parse("post.1"), make_examples([5]))


def test_another_request_for_the_directory_is_refused(tmp_path):
    examples = make_examples([5, 6])
    write_dump(ModelStates(MODEL, SPEC, examples), tmp_path / "d")
    for match, job in {
        "spec: 'post.0, embed, post.3' here, 'post.0, embed, post.2' there": ModelStates(
            MODEL, CaptureSpec.parse("post.0, embed, post.2"), examples
        ),
        "target model: the weights differ": ModelStates(tiny.llama(seed=1), SPEC, examples),
        "data: made up": ModelStates(MODEL, SPEC, make_examples([5, 6], seed=1)),
        "dtype: float32 here, bfloat16 there": ModelStates(MODEL, SPEC, examples, dtype="bfloat16"),
    }.items():
        with pytest.raises(StoreError, match=match):
            write_dump(job, tmp_path / "d")


def test_an_estimate_counts_what_is_left(tmp_path):
    examples = make_examples([5, 6, 7])
    job = ModelStates(MODEL, SPEC, examples, shard_tokens=7)
    before = estimate(job, tmp_path / "new" / "d")
    assert (before.sequences, before.tokens, before.tokens_left) == (3, 18, 18)
    assert before.seconds > 0
    assert not (tmp_path / "new").exists()
    write_dump(job, tmp_path / "d")
    written = sum(path.stat().st_size for path in (tmp_path / "d").glob("*.safetensors"))
    assert 0 <= written - before.bytes < 3 * 1024  # the headers
    assert estimate(job, tmp_path / "d").bytes_left == 0


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
import test_job
test_job.torch.set_num_threads(1)
states = test_job.ModelStates(
    test_job.MODEL, test_job.SPEC, test_job.make_examples(test_job.MANY), shard_tokens=300, batch_tokens=200
)
test_job.write_dump(states, sys.argv[1], lambda tokens: print(tokens, flush=True))
"""
MANY = range(1, 140)


def killed(directory, reports, seconds):
    """Dump in a process of its own; kill it so many progress reports and seconds after its start."""
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, directory, Path(__file__).parent], stdout=subprocess.PIPE, text=True
    )
    for _ in range(reports):
        process.stdout.readline()
    time.sleep(seconds)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_killed_at_any_moment_and_resumed_it_is_byte_for_byte_the_same(tmp_path):
    examples, arguments = make_examples(MANY), {"shard_tokens": 300, "batch_tokens": 200}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        write_dump(ModelStates(MODEL, SPEC, examples, **arguments), tmp_path / "whole")
        chance, sizes = random.Random(0), []
        for _ in range(2):
            assert killed(tmp_path / "killed", chance.randint(1, 15), chance.uniform(0.0, 0.01))
            sizes.append(len(list((tmp_path / "killed").glob("*.safetensors"))))
            # What the manifest lists is complete, whenever the kill came.
            dump = Dump.open(tmp_path / "killed", partial=True, verify=True)
            for stored, example in zip(dump, examples, strict=False):
                assert torch.equal(stored.token_ids, example.token_ids)
        assert sizes == sorted(sizes)
        write_dump(ModelStates(MODEL, SPEC, examples, **arguments), tmp_path / "killed")
    finally:
        torch.set_num_threads(threads)
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "killed").iterdir())
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "killed" / name).read_bytes(), name
