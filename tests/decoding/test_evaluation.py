"""What `evaluate` and the commands report is true."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from capture_hooks.capture import bind
from capture_hooks.cli.app import build
from capture_hooks.decoding import Prompt, SpeculativeDecoder, evaluate, offline_acceptance, read_prompts
from capture_hooks.decoding.evaluation import compare
from capture_hooks.decoding.stats import DecodeStats, Round
from capture_hooks.decoding.target import Target
from capture_hooks.errors import DataError, DecodingError, ModelError
from capture_hooks.heads import make_witness, save_head
from capture_hooks.testing import tiny

FIRST = 3


@pytest.fixture(scope="module")
def llama():
    return tiny.llama(num_hidden_layers=3)


ROUNDS = st.lists(
    st.integers(0, 5).flatmap(lambda depth: st.tuples(st.just(depth), st.integers(0, depth))), max_size=20
)


@given(ROUNDS, ROUNDS)
@settings(max_examples=60, deadline=None)
def test_stats_add_up(first, second):
    made = [
        DecodeStats.of([Round((0,) * (a + 1), d, d, a, 1.0, 2.0, 0.5) for d, a in rounds], 3.0)
        for rounds in (first, second)
    ]
    both = made[0] + made[1]
    everything = first + second
    assert both.rounds == len(everything)
    assert both.tokens == sum(a + 1 for _, a in everything)
    assert both.prefill_seconds == 6.0
    for at, share in enumerate(both.conditional_acceptance):
        reached = [a for d, a in everything if d > at and a >= at]
        expected = sum(a > at for a in reached) / len(reached) if reached else math.nan
        assert share == expected or math.isnan(share) == math.isnan(expected)
    if everything:
        assert both.acceptance_length == both.tokens / both.rounds
        assert both.round_seconds == pytest.approx(3.5)
    json.dumps(both.to_json(), allow_nan=False)


def test_evaluate(llama, knowing_head):
    decoder = SpeculativeDecoder(llama, knowing_head(llama, FIRST, 1.0), 3)
    prompts = [Prompt(torch.tensor([FIRST, 9, at]), source=f"p{at}") for at in (40, 41, 42, 43)]
    calls = []
    report = evaluate(decoder, prompts, max_new_tokens=13, on_progress=lambda *args: calls.append(args))
    assert (report.identical, report.prompts, report.lossless) == (4, 4, True)
    assert report.stats.acceptance_length == 4
    assert report.offline is None
    assert report.break_even == pytest.approx(report.round_seconds / report.step_seconds)
    assert calls[-1] == ("decoding", 4, 4)
    low, high = report.speedup_interval
    assert low < report.speedup * 1.5
    assert high > report.speedup / 1.5
    read = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert read["identical"] == 4
    assert read["settings"]["draft_tokens"] == 3
    assert dict(report.table())["identical"] == "4/4"


def test_a_wrong_token_is_a_failure_and_a_near_tie_is_excused(llama):
    target = Target(llama, bind(llama, "post.0"))
    prompt = torch.tensor([FIRST, 9, 40])
    answer = llama.generate(prompt[None], do_sample=False, max_new_tokens=6)[0, 3:]
    assert compare(target, prompt, answer, answer, 4) is None
    wrong = answer.clone()
    wrong[2] = (wrong[2] + 1) % 200
    divergence = compare(target, prompt, wrong, answer, 4, "p")
    assert (divergence.position, divergence.excused) == (2, False)
    with torch.no_grad():
        best = llama(torch.cat([prompt, answer[:2]])[None]).logits[0, -1].topk(2).values
    assert divergence.gap == pytest.approx(float(best[0] - best[1]), abs=1e-4)
    assert "ABOVE" in str(divergence)
    # A target whose two best logits are equal everywhere: any rounding decides, so either token is right.
    tied = tiny.llama(num_hidden_layers=2)
    with torch.no_grad():
        tied.lm_head.weight = torch.nn.Parameter(tied.lm_head.weight.clone())
        tied.lm_head.weight[1::2] = tied.lm_head.weight[::2]
    target = Target(tied, bind(tied, "post.0"))
    answer = tied.generate(prompt[None], do_sample=False, max_new_tokens=4)[0, 3:]
    other = answer.clone()
    other[1] ^= 1
    divergence = compare(target, prompt, other, answer, 4)
    assert divergence.gap == 0
    assert divergence.noise < 1e-3
    assert divergence.excused == (divergence.noise > 0)
    shorter = compare(target, prompt, answer[:2], answer, 4)
    assert (shorter.position, shorter.ours) == (2, None)


def test_offline_acceptance_is_the_heads_own_count(llama, eagle3_head):
    head = eagle3_head(llama)
    ids = torch.tensor([3, 9, 40, 12, 9, 6, 15, 33, 18, 21, 24, 27])
    mask = torch.tensor([False] * 3 + [True] * 9)
    result = offline_acceptance(llama, head, [(ids, mask), (ids[:8], mask[:8])])
    assert not head.training
    # Step 0 by hand: rows whose token two ahead is learnt; the head's arg-max against the target's.
    with bind(llama, head.spec) as capture, torch.no_grad():
        logits = llama(ids[None]).logits[0]
    states = capture.states.packed
    hits = rows = 0
    for length in (12, 8):
        cache = head.new_cache(length)
        hidden = head.extend(cache, states[: length - 1], ids[1:length], 0)
        drafted = head.draft_token_ids[head.logits(hidden).argmax(-1)]
        greedy = logits[1:length].argmax(-1)
        for row in range(length - 2):
            if mask[row + 2]:
                rows += 1
                hits += int(drafted[row] == greedy[row])
    assert result.rows[0] == rows
    assert result.hits[0] == hits
    with pytest.raises(DataError):
        offline_acceptance(llama, head, [])


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_prompts_of_every_kind(tmp_path):
    tokenizer = tiny.tokenizer()
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    path = write(
        tmp_path / "p.jsonl",
        [
            {"prompt_ids": [5, 6], "answer_ids": [7]},
            {"prompt_ids": [5, 6]},
            {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 1, 0, 1, 0]},
            {"messages": chat},
            {"messages": chat[:1]},
            {"prompt": "hi"},
            {"text": "hi"},
        ],
    )
    a, b, c, d, e, f, g = read_prompts(path, tokenizer)
    assert (a.token_ids.tolist(), a.answered.tolist(), a.loss_mask.tolist()) == (
        [5, 6], [5, 6, 7], [False, False, True],
    )  # fmt: skip
    assert (b.token_ids.tolist(), b.answered) == ([5, 6], None)
    assert c.token_ids.tolist() == [1, 2, 3]
    assert tokenizer.decode(d.token_ids) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert d.answered is not None
    assert e.token_ids.tolist() == f.token_ids.tolist() == d.token_ids.tolist()
    assert tokenizer.decode(g.token_ids) == "hi"
    assert g.source.endswith("p.jsonl:7")


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt_ids": []}, "prompt is empty"),
        ({"prompt_ids": [5, 400]}, "400 is outside the model's vocabulary of 272"),
        ({"prompt_ids": [True]}, r"'prompt_ids'\[0\] is true, not a token id"),
        ({"question": "x"}, r"nothing to read in a record of \['question'\]"),
        ({"prompt": 5}, "'prompt' is a string"),
    ],
)
def test_bad_prompts_name_their_line(tmp_path, record, message):
    path = write(tmp_path / "p.jsonl", [{"prompt_ids": [5]}, record])
    with pytest.raises(DataError, match=f"p.jsonl:2: .*{message}"):
        read_prompts(path, tiny.tokenizer(), vocab_size=272)


def test_a_tokenizer_without_template(tmp_path):
    path = write(tmp_path / "p.jsonl", [{"prompt": "hi"}])
    with pytest.raises(DataError, match="no chat template"):
        read_prompts(path, tiny.tokenizer(chat_template=None))
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(DataError, match="holds no prompt"):
        read_prompts(tmp_path / "none.jsonl")


@pytest.fixture(scope="module")
def saved(llama, eagle3_head, tmp_path_factory):
    """A target and a head for it, on disk."""
    place = tmp_path_factory.mktemp("saved")
    llama.save_pretrained(place / "model")
    tiny.tokenizer().save_pretrained(place / "model")
    head = eagle3_head(llama)
    witness = make_witness(llama, head.spec, [[(7 * i * i + s) % 250 for i in range(20)] for s in range(3)])
    save_head(head, place / "head", model=llama, witness=witness)
    return place


def run(*arguments):
    words = [str(argument) for argument in arguments]
    return CliRunner().invoke(build(words), words)


def test_generate_command(saved, llama):
    result = run(
        "generate",
        "--model",
        saved / "model",
        "--head",
        saved / "head",
        "--prompt",
        "hello",
        "--max-new-tokens",
        12,
    )
    assert result.exit_code == 0, result.output
    tokenizer = tiny.tokenizer()
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    expected = llama.generate(ids, do_sample=False, max_new_tokens=12, attention_mask=torch.ones_like(ids))
    assert tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True).strip() in result.stdout
    assert "acceptance length" in result.stderr


def test_eval_command(saved, tmp_path):
    data = write(
        tmp_path / "d.jsonl", [{"prompt_ids": [3, 9, at], "answer_ids": [5, 6, 7, 8]} for at in range(3)]
    )
    common = ("--model", saved / "model", "--head", saved / "head", "--data", data, "--max-new-tokens", 8)
    result = run("eval", *common, "--json", "--tree", "2,2,3")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["identical"], report["prompts"]) == (3, 3)
    assert len(report["offline"]["acceptance"]) >= 1
    assert report["settings"]["tree"] == {"depth": 2, "branch": 2, "size": 3}
    shown = run("eval", *common, "--limit", 1)
    assert shown.exit_code == 0
    assert "break-even acceptance length" in shown.stdout
    assert "1/1" in shown.stdout


def test_commands_refuse_in_one_line(saved, tmp_path):
    data = write(tmp_path / "d.jsonl", [{"prompt_ids": [3, 9]}])
    common = ("--model", saved / "model", "--head", saved / "head", "--data", data)
    result = run("eval", *common, "--max-new-tokens", 400)
    assert isinstance(result.exception, DecodingError)
    assert "context of 256" in str(result.exception)
    assert run("eval", *common, "--tree", "2x").exit_code == 2
    result = run("eval", "--model", tmp_path / "no", "--head", saved / "head", "--data", data)
    assert isinstance(result.exception, ModelError)
    assert "cannot load the model" in str(result.exception)
