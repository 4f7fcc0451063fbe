"""Opening a target: one class for every command, adapters merged, and one clear error for what is broken."""

import contextlib
import copy
import json
import shutil

import pytest
import torch
from peft import IA3Config, LoraConfig, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file

from capture_hooks.capture import find_anatomy
from capture_hooks.capture.fingerprint import TargetFingerprint
from capture_hooks.cli import main
from capture_hooks.errors import ModelError
from capture_hooks.target import (
    checkpoint_fingerprint,
    final_norm_of,
    load_config,
    load_processor,
    load_target,
    load_tokenizer,
    skeleton,
)
from capture_hooks.testing import tiny

ADAPTER, CONFIG = "adapter_config.json", "config.json"
IDS = torch.arange(3, 23).view(2, 10)


@pytest.fixture
def llama(tmp_path):
    """The directory of a whole model with its tokenizer."""
    tiny.llama().save_pretrained(tmp_path / "llama")
    tiny.tokenizer().save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("family", tiny.families())
def test_every_family_opens_as_the_class_that_wrote_it(tmp_path, family):
    written = tiny.model(family)
    written.save_pretrained(tmp_path)
    opened = load_target(str(tmp_path), "float32", "cpu")
    assert type(opened) is type(skeleton(str(tmp_path))) is type(written)
    assert not opened.training
    with torch.no_grad():
        assert torch.equal(opened(IDS).logits, written(IDS).logits)
    # transformers itself makes a tokenizer without a vocabulary for some of them.
    assert load_tokenizer(str(tmp_path)) is None


def test_a_multimodal_config_that_names_no_class(tmp_path):
    written = tiny.model("qwen3_vl")
    written.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": None}))
    assert type(load_target(str(tmp_path), "float32", "cpu")) is type(written)


ADAPTERS = {
    "lora": LoraConfig(target_modules=["q_proj", "down_proj"], r=2),
    "lora on lm_head": LoraConfig(target_modules=["v_proj", "lm_head"], r=2),
    "dora": LoraConfig(target_modules=["q_proj"], r=2, use_dora=True),
    "ia3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "a norm and an embedding saved whole": LoraConfig(
        target_modules=["q_proj"], r=2, modules_to_save=["norm", "embed_tokens"]
    ),
}


def adapted(base, config, directory, **overrides):
    """Train nothing, but let every parameter of the adapter be random; the adapted model."""
    model = tiny.llama(**overrides)
    model.name_or_path = str(base)
    torch.manual_seed(0)  # the adapter's own random start
    wrapped = get_peft_model(model, copy.deepcopy(config))
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                generator = torch.manual_seed(parameter.numel())
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 4)
    wrapped.save_pretrained(directory)
    return wrapped.eval()


@pytest.mark.parametrize("kind", ADAPTERS)
def test_an_adapter_is_its_merged_model(tmp_path, llama, kind):
    wrapped = adapted(llama, ADAPTERS[kind], tmp_path / "adapter")
    opened = load_target(str(tmp_path / "adapter"), "float32", "cpu")
    with torch.no_grad():
        expected, plain = wrapped(IDS).logits, tiny.llama()(IDS).logits
        assert (expected - plain).abs().max() > 0.05
        torch.testing.assert_close(opened(IDS).logits, expected, rtol=1e-4, atol=1e-4)
    whole = wrapped.merge_and_unload()
    whole.save_pretrained(tmp_path / "merged")
    print_ = TargetFingerprint.of(find_anatomy(opened))
    assert print_ == checkpoint_fingerprint(str(tmp_path / "adapter"), "float32")
    assert print_ == checkpoint_fingerprint(str(tmp_path / "merged"), "float32")
    assert print_ != checkpoint_fingerprint(str(llama), "float32")
    states = torch.randn(4, tiny.HIDDEN, generator=torch.manual_seed(0))
    norm = final_norm_of(str(tmp_path / "adapter"), torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(norm(states), whole.model.norm(states))
    assert load_tokenizer(str(tmp_path / "adapter"))("hello") == tiny.tokenizer()("hello")
    assert load_config(str(tmp_path / "adapter")).num_hidden_layers == tiny.LAYERS


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("modules", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_an_adapter_on_one_of_two_tied_layers(tmp_path, modules, both):
    tiny.llama(tie_word_embeddings=True).save_pretrained(tmp_path / "base")
    config = LoraConfig(target_modules=modules, r=2, ensure_weight_tying=both)
    wrapped = adapted(tmp_path / "base", config, tmp_path / "adapter", tie_word_embeddings=True)
    opened = load_target(str(tmp_path / "adapter"), "float32", "cpu")
    print_ = TargetFingerprint.of(find_anatomy(opened))
    assert print_ == TargetFingerprint.of(find_anatomy(wrapped))
    opened.save_pretrained(tmp_path / "merged")
    again = load_target(str(tmp_path / "merged"), "float32", "cpu")
    assert print_ == TargetFingerprint.of(find_anatomy(again))
    with torch.no_grad():
        expected = wrapped(IDS).logits
        for model in (opened, again):
            torch.testing.assert_close(model(IDS).logits, expected, rtol=1e-4, atol=1e-4)


def test_an_adapter_that_does_more_than_change_weights(tmp_path, llama):
    config = LoraConfig(target_modules=["q_proj"], r=2, task_type="CAUSAL_LM", alora_invocation_tokens=[5])
    adapted(llama, config, tmp_path / "adapter")
    with pytest.raises(ModelError, match="the model"):
        load_target(str(tmp_path / "adapter"), "float32", "cpu")


def test_an_adapter_inside_its_bases_directory(tmp_path, llama):
    wrapped = adapted(llama, ADAPTERS["lora"], llama)
    with torch.no_grad():
        torch.testing.assert_close(load_target(str(llama), "float32", "cpu")(IDS).logits, wrapped(IDS).logits)


def test_every_command_takes_an_adapter_for_the_merged_model(tmp_path, llama, monkeypatch, capsys):
    """States dumped through the adapter train a head for the merged model, and it serves both."""
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    adapted(llama, ADAPTERS["lora on lm_head"], adapter).merge_and_unload().save_pretrained(merged)
    tiny.tokenizer().save_pretrained(merged)
    data, dump, head = tmp_path / "data.jsonl", tmp_path / "dump", tmp_path / "head"
    data.write_text('{"text": "a first line"}\n{"text": "and a second one"}\n')
    capsys.readouterr()

    def command(*words):
        monkeypatch.setattr("sys.argv", ["capture-hooks", *map(str, words)])
        with contextlib.suppress(SystemExit):
            main()
        printed = capsys.readouterr()
        assert "error" not in printed.err, printed.err
        return printed.out

    spec = "post.0, post.2, post.4"
    command("dump", "--model", adapter, "--spec", spec, "--data", data, "--out", dump)
    command("train", "--model", merged, "--dump", dump, "--out", head, "--steps", 1, "--evaluations", 0)
    for model in (adapter, merged):
        words = ("eval", "--model", model, "--head", head, "--data", data, "--max-new-tokens", 6, "--json")
        assert json.loads(command(*words))["lossless"]


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def drop(directory, name):
    path = directory / "adapter_model.safetensors"
    tensors = load_file(path)
    del tensors[next(key for key in tensors if name in key)]
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda d: change(d / ADAPTER, base_model_name_or_path=None),
            "does not say which model",
        ),
        (
            lambda d: change(d / ADAPTER, base_model_name_or_path="/no/where"),
            "no such directory",
        ),
        (lambda d: change(d / ADAPTER, base_model_name_or_path=str(d)), "itself an adapter"),
        (lambda d: (d / ADAPTER).write_text("{"), "cannot read the adapter's settings"),
        (lambda d: change(d / ADAPTER, r=3), "cannot load the model"),
        (lambda d: change(d / ADAPTER, peft_type="NEWER"), "cannot load the model"),
        (lambda d: change(d / ADAPTER, target_modules=["q_proj"]), "no place for"),
        (lambda d: drop(d, "lora_B"), "lacks"),
        (lambda d: (d / "adapter_model.safetensors").write_bytes(b"\0" * 20), "cannot load the model"),
        (lambda d: (d / "adapter_model.safetensors").unlink(), "cannot load the model"),
    ],
)
def test_a_broken_adapter(tmp_path, llama, spoil, words):
    adapted(llama, ADAPTERS["lora"], tmp_path / "adapter")
    spoil(tmp_path / "adapter")
    with pytest.raises(ModelError, match=words):
        load_target(str(tmp_path / "adapter"), "float32", "cpu")


def test_a_learnt_prompt_is_no_target(tmp_path, llama):
    model = tiny.llama()
    model.name_or_path = str(llama)
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match="PREFIX_TUNING: it puts learnt rows before every prompt"):
        load_target(str(tmp_path / "adapter"), "float32", "cpu")


@pytest.mark.parametrize("command", ["dump", "eval", "serve"])
def test_an_engine_is_given_no_adapter(tmp_path, llama, monkeypatch, capsys, command):
    adapted(llama, ADAPTERS["lora"], tmp_path / "adapter")
    (tmp_path / "data.jsonl").write_text('{"text": "hello"}\n')
    words = {
        "dump": ["--spec", "eagle3", "--data", tmp_path / "data.jsonl", "--out", tmp_path / "dump"],
        "eval": ["--head", tmp_path / "head", "--data", tmp_path / "data.jsonl"],
        "serve": [tmp_path / "head"],
    }[command]
    words = [command, *words, "--engine", "vllm", "--model", tmp_path / "adapter"]
    monkeypatch.setattr("sys.argv", ["capture-hooks", *map(str, words)])
    with pytest.raises(SystemExit) as exited:
        main()
    assert exited.value.code == 1
    assert "holds an adapter, and an engine is given whole models" in capsys.readouterr().err
    assert not (tmp_path / "dump").exists()


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def shard(directory, lost):
    """The model in several files, one of them lost."""
    tiny.llama().save_pretrained(directory, max_shard_size="30KB")
    (directory / "model.safetensors").unlink()
    sorted(directory.glob("model-*.safetensors"))[lost].unlink()


def forget(directory, name):
    tensors = load_file(directory / "model.safetensors")
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: truncate(d / "model.safetensors"), "SafetensorError"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), "cannot load the model"),
        (lambda d: (d / "model.safetensors").unlink(), "model.safetensors"),
        (lambda d: shard(d, 1), "cannot load the model"),
        (
            lambda d: forget(d, "model.layers.1.mlp.up_proj.weight"),
            "lacks 1 of the weights.*layers.1.mlp.up_proj",
        ),
        (lambda d: (d / CONFIG).write_text("{"), "cannot load the model"),
        (lambda d: (d / CONFIG).write_text("[]"), "cannot load the model"),
        (lambda d: (d / CONFIG).write_bytes(b"\xff\xfe{}"), "cannot load the model"),
        (lambda d: (d / CONFIG).unlink(), "cannot load the model"),
        (lambda d: change(d / CONFIG, model_type="newer"), "newer"),
        (lambda d: change(d / CONFIG, model_type="vit", architectures=None), "has no language model"),
        (lambda d: change(d / CONFIG, hidden_size="wide"), "cannot load the model"),
        (lambda d: change(d / CONFIG, hidden_size=48), "cannot load the model"),
        (lambda d: change(d / CONFIG, num_hidden_layers=9), "lacks .* of the weights"),
        (
            lambda d: change(d / CONFIG, rope_parameters={"rope_type": "spiral"}),
            "cannot load the model",
        ),
        (lambda d: change(d / CONFIG, hidden_act="none such"), "none such"),
        (
            lambda d: change(d / CONFIG, dtype="float8_e4m3fn"),
            "float8_e4m3fn, in which it cannot be run",
        ),
        (lambda d: shutil.rmtree(d), "cannot load the model"),
    ],
)
def test_a_broken_checkpoint(llama, spoil, words):
    spoil(llama)
    with pytest.raises(ModelError, match=words) as refused:
        load_target(str(llama), "auto", "cpu")
    assert str(llama) in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "bf16", "", "nonsense"])
def test_a_dtype_no_model_can_be_run_in(llama, dtype):
    with pytest.raises(ModelError, match="give auto, float32, bfloat16"):
        load_target(str(llama), dtype, "cpu")


@pytest.mark.parametrize("spoil", ["damaged", "without vocabulary"])
def test_a_broken_tokenizer_is_not_taken_for_none(llama, spoil):
    if spoil == "damaged":
        (llama / "tokenizer.json").write_text('{"version": "1.0", "model": {}}')
    else:
        (llama / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="cannot load the tokenizer"):
        load_tokenizer(str(llama))


def test_a_model_of_text_alone_has_no_processor(tmp_path, llama):
    assert load_processor(str(llama)) is None
    tiny.model("llava").save_pretrained(tmp_path / "llava")
    with pytest.raises(ModelError, match="cannot load the model"):
        load_processor(str(tmp_path / "llava"))
