"""Conversations with images: dumped is what the processor and a plain forward with hooks give."""

import json

import pytest
import torch

from capture_hooks.errors import DataError, StoreError
from capture_hooks.spec import CaptureSpec
from capture_hooks.store import Dump, ModelStates, read_examples, write_dump
from capture_hooks.testing import tiny, tiny_vision

pytest.importorskip("PIL", reason="images need pillow")
FAMILIES = sorted(tiny_vision.PLACEHOLDERS)
SPEC = CaptureSpec.parse("embed, pre.1, post.1, post.4")


@pytest.fixture
def pictures(tmp_path):
    """Files of several sizes."""
    made = []
    for seed, size in enumerate([(20, 28), (28, 20), (12, 30), (24, 24)]):
        made.append(tmp_path / f"{seed}.png")
        tiny_vision.picture(seed, *size).save(made[-1])
    return made


def shown(path):
    return {"type": "image", "image": str(path)}


def said(text):
    return {"type": "text", "text": text}


def conversations(pictures):
    """None, one, several images; one in the assistant's turn; a text as long as one with images."""
    one, two, three, four = pictures
    return [
        [("user", [shown(one), said("what is it?")]), ("assistant", "a cat\nand a hat")],
        [("user", "no picture"), ("assistant", "then no answer")],
        [
            ("user", [said("first "), shown(two), said("\nthen "), shown(three)]),
            ("assistant", "like: "),
            ("user", [said("and\n"), shown(four), said("\n?")]),
            ("assistant", [said("see "), shown(one), said(" there")]),
        ],
        [("user", "x" * 40), ("assistant", "y" * 30)],
    ]


def prepared(family, turns):
    """The sequence as transformers alone makes it."""
    messages = [{"role": role, "content": content} for role, content in turns]
    return tiny_vision.processor(family).apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt"
    )


def examples_of(family, pictures):
    """As the reader gives them."""
    rows = [
        {"messages": [{"role": role, "content": content} for role, content in turns]}
        for turns in conversations(pictures)
    ]
    file = pictures[0].with_name("data.jsonl")
    file.write_text("\n".join(map(json.dumps, rows)))
    processor = tiny_vision.processor(family)
    return read_examples(file, processor.tokenizer, processor=lambda: processor)


@torch.no_grad()
def plainly(model, inputs):
    """Embedding, inputs and outputs of layers, final norm and greedy tokens, by torch's hooks alone."""
    inner = model.model.language_model
    seen = {}
    handles = []
    for k, layer in enumerate(inner.layers):

        def before(module, args, kwargs, k=k):
            seen[f"pre.{k}"] = args[0] if args else kwargs["hidden_states"]

        def after(module, args, output, k=k):
            seen[f"post.{k}"] = output if isinstance(output, torch.Tensor) else output[0]

        handles.append(layer.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(layer.register_forward_hook(after))
    handles.append(inner.norm.register_forward_hook(lambda m, a, output: seen.update(final_norm=output)))
    logits = model(**inputs).logits
    for handle in handles:
        handle.remove()
    return {name: state[0] for name, state in seen.items()}, logits[0].argmax(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_the_processors_and_images_are_never_learnt(family, pictures):
    processor = tiny_vision.processor(family)
    image_token = processor.tokenizer.image_token_id
    for made, turns in zip(examples_of(family, pictures), conversations(pictures), strict=True):
        reference = prepared(family, turns)
        assert made.token_ids.tolist() == reference["input_ids"][0].tolist()
        if made.media is None:
            continue
        assert not (made.loss_mask & (made.token_ids == image_token)).any()
        learnt = processor.tokenizer.decode(made.token_ids[made.loss_mask])
        wanted = {1: "a cat\nand a hat<|im_end|>", 4: "like: <|im_end|>see  there<|im_end|>"}
        assert learnt == wanted[len(made.media.images)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_tokens", [1, 4096])
def test_a_dump_holds_the_states_of_a_plain_forward(family, pictures, tmp_path, batch_tokens):
    model = tiny.model(family)
    data = examples_of(family, pictures)
    write_dump(ModelStates(model, SPEC, data, batch_tokens=batch_tokens, shard_tokens=60), tmp_path / "dump")
    dump = Dump.open(tmp_path / "dump")
    assert len(dump) == len(data)
    image_rows = 0
    for stored, made, turns in zip(
        map(dump.sequence, range(len(data))), data, conversations(pictures), strict=True
    ):
        inputs = prepared(family, turns)
        states, greedy = plainly(model, inputs)
        wanted = torch.cat([states["pre.0"], states["pre.1"], states["post.1"], states["post.4"]], dim=-1)
        torch.testing.assert_close(stored.states, wanted, rtol=0, atol=2e-6)
        torch.testing.assert_close(stored.target, states["final_norm"], rtol=0, atol=2e-6)
        assert stored.argmax.tolist() == greedy.tolist()
        assert stored.token_ids.tolist() == inputs["input_ids"][0].tolist()
        assert stored.loss_mask.tolist() == made.loss_mask.tolist()
        rows = stored.token_ids == model.config.image_token_id
        assert not stored.loss_mask[rows & torch.tensor(made.media is not None)].any()
        image_rows += int(rows.sum())
        if made.media is not None:  # the pixels matter, from the first row that shows them
            dark = plainly(model, {**inputs, "pixel_values": torch.zeros_like(inputs["pixel_values"])})[0]
            at = int(rows.nonzero()[0])
            assert (dark["post.4"][at:] - states["post.4"][at:]).abs().max() > 1e-2
    assert image_rows >= 20


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_dump_leaves_no_positions_behind_in_the_model(family, pictures, tmp_path):
    model = tiny.model(family)
    write_dump(ModelStates(model, SPEC, examples_of(family, pictures)), tmp_path / "dump")
    assert model.model.rope_deltas is None


def test_a_dump_of_other_images_is_not_continued(pictures, tmp_path):
    model = tiny.model("llava")
    write_dump(ModelStates(model, SPEC, examples_of("llava", pictures)), tmp_path / "dump")
    manifest = json.loads((tmp_path / "dump" / "manifest.json").read_text())
    tiny_vision.picture(9, 20, 28).save(pictures[0])
    with pytest.raises(StoreError, match="data: "):
        write_dump(ModelStates(model, SPEC, examples_of("llava", pictures)), tmp_path / "dump")
    assert json.loads((tmp_path / "dump" / "manifest.json").read_text()) == manifest


def test_a_dump_of_other_pixels_of_the_same_images_is_not_continued(pictures, tmp_path):
    model, data = tiny.model("llava"), examples_of("llava", pictures)
    write_dump(ModelStates(model, SPEC, data), tmp_path / "dump")
    processor = tiny_vision.processor("llava")
    processor.image_processor.image_mean = [0.5, 0.5, 0.5]
    file = pictures[0].with_name("data.jsonl")
    other = read_examples(file, processor.tokenizer, processor=lambda: processor)
    assert [made.token_ids.tolist() for made in other] == [made.token_ids.tolist() for made in data]
    with pytest.raises(StoreError, match="data: "):
        write_dump(ModelStates(model, SPEC, other), tmp_path / "dump")


def test_an_image_that_changes_while_the_dump_runs_is_refused(pictures, tmp_path):
    data = examples_of("llava", pictures)
    tiny_vision.picture(9, 20, 28).save(pictures[0])
    with pytest.raises(
        DataError, match=r"data\.jsonl:1: the image .*0\.png has changed since the data was read"
    ):
        write_dump(ModelStates(tiny.model("llava"), SPEC, data), tmp_path / "dump")
