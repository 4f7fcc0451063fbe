"""Real SGLang 0.5.23 on this CPU, its kernels from ``sgl-kernel-cpu``, against transformers' greedy decoding.

Skipped where SGLang is not installed: see README.md.  One engine per module-scoped fixture, for a start takes
20 to 50 seconds.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed (tests/engines/README.md)", allow_module_level=True)

from transformers import LlamaConfig, LlamaForCausalLM

HIDDEN, VOCAB, STICKY = 128, 512, 77
#: Ends in the token that the target repeats for ever, so that a draft which knows it is always right.
STUCK = [1, 5, 9, 20, 33, 101, 300, STICKY]
PROMPTS = [
    [1, 5, 9, 20, 33],
    [1, *range(10, 50)],
    [1, *range(10, 50), 400, 401, 402],  # extends the one before: its cache is reused
    [1, *range(10, 30), 7, 8],  # leaves that one in the middle
    [1, 450],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random target that repeats one token once it is there, and a draft that only knows this token."""
    root = tmp_path_factory.mktemp("sglang")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).float().eval()
    direction = torch.nn.functional.normalize(torch.randn(HIDDEN), dim=0)
    with torch.no_grad():
        model.model.embed_tokens.weight[STICKY] = 200 * direction
        model.lm_head.weight[STICKY] = 3 * direction
    model.save_pretrained(root / "target")
    _save_draft(root / "draft", direction)
    return root


def _save_draft(path: Path, direction: torch.Tensor) -> None:
    """An EAGLE-3 head in SGLang's layout that drafts `STICKY` where the target's states point there."""
    kv = HIDDEN // 2

    def random(*shape):
        return 0.01 * torch.randn(*shape)

    first = torch.nn.functional.one_hot(torch.tensor(0), HIDDEN).float()
    lm_head = torch.zeros(VOCAB, HIDDEN)
    lm_head[STICKY] = first
    layer = {
        "hidden_norm": torch.ones(HIDDEN),
        "input_layernorm": torch.ones(HIDDEN),
        "post_attention_layernorm": torch.ones(HIDDEN),
        "self_attn.q_proj": random(HIDDEN, 2 * HIDDEN),
        "self_attn.k_proj": random(kv, 2 * HIDDEN),
        "self_attn.v_proj": random(kv, 2 * HIDDEN),
        "self_attn.o_proj": random(HIDDEN, HIDDEN),
        "mlp.gate_proj": random(256, HIDDEN),
        "mlp.up_proj": random(256, HIDDEN),
        "mlp.down_proj": random(HIDDEN, 256),
    }
    weights = {f"midlayer.{name}.weight": value for name, value in layer.items()}
    weights |= {
        "fc.weight": torch.outer(first, direction).repeat(1, 3),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": lm_head,
        "d2t": torch.zeros(VOCAB, dtype=torch.long),
        "t2d": torch.ones(VOCAB, dtype=torch.bool),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    }
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def greedy(folder):
    """What transformers' greedy decoding continues a prompt with."""
    model = LlamaForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()

    def continuation(prompt, count):
        ids = torch.tensor([prompt])
        for _ in range(count):  # without a cache: nothing of generate() is taken on trust
            with torch.no_grad():
                ids = torch.cat((ids, model(ids).logits[:, -1:].argmax(-1)), 1)
        return ids[0, len(prompt) :].tolist()

    return continuation


@pytest.fixture(scope="module")
def start(folder):
    """Start an engine in a CPU's environment; it is shut down at the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_USE_CPU_ENGINE", "1")
        patch.setenv("SGL_KERNEL_CPU_ATTENTION", "1")
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # compiling takes half a minute, of the first request
        from sglang.srt.entrypoints.engine import Engine

        engines = []

        def run(**options):
            while engines:  # one at a time: each holds a pool and processes
                engines.pop().shutdown()
            engine = Engine(
                model_path=str(folder / "target"),
                skip_tokenizer_init=True,
                device="cpu",
                dtype="float32",
                max_total_tokens=2048,
                max_running_requests=4,
                disable_overlap_schedule=True,
                disable_cuda_graph=True,
                log_level="error",
                **options,
            )
            engines.append(engine)
            return engine

        yield run
        while engines:
            engines.pop().shutdown()


@pytest.fixture(scope="module")
def plain(start):
    """Prefill by SGLang's own torch attention, decode by ours."""
    return start(prefill_attention_backend="torch_native", decode_attention_backend="intel_amx")


@pytest.fixture(scope="module", params=[(1, 4), (4, 8)], ids=["chain", "tree"])
def eagle(request, start, folder):
    """EAGLE-3 of 3 steps on our attention, with (top-k, drafted tokens)."""
    topk, tokens = request.param
    return start(
        attention_backend="intel_amx",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path=str(folder / "draft"),
        speculative_num_steps=3,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=tokens,
    )


def generate(engine, prompts, count=20):
    """Generated ids and meta information of each prompt, all in one batch."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    return [out["output_ids"] for out in outputs], [out["meta_info"] for out in outputs]


def check_alone_and_together(engine, greedy, unit):
    """The radix cache compares prompts in runs of ``unit`` tokens: EAGLE's entries are pairs."""
    expected = [greedy(prompt, 20) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)
    reused = []
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        (got,), (meta,) = generate(engine, [prompt])
        reused.append(meta["cached_tokens"])
        assert got == tokens
    assert reused[1:4] == [2 - unit, 42 - unit, 22 - unit]  # common prefixes of 1, 41 and 21 tokens
    engine.flush_cache()
    assert generate(engine, PROMPTS[:4])[0] == expected[:4]


def test_tokens_are_those_of_transformers(plain, greedy):
    check_alone_and_together(plain, greedy, unit=1)


def test_speculation_changes_no_token(eagle, greedy):
    check_alone_and_together(eagle, greedy, unit=2)


def test_a_draft_that_is_right_is_accepted_whole(eagle, greedy):
    (got,), (meta,) = generate(eagle, [STUCK], count=13)
    assert got == greedy(STUCK, 13) == [STICKY] * 13
    # One token from the prefill, then 3 rounds of 3 right drafts and the target's own token: 4 a round.
    # SGLang's own spec_accept_length divides all 13 by the rounds.
    assert meta["spec_verify_ct"] == 3
    assert meta["spec_num_correct_drafts"] == 9
    assert meta["spec_correct_drafts_histogram"] == [0, 0, 0, 3]
