"""Rows with images: every form people have gives the same sequence; what cannot be used is named."""

import base64
import json
import shutil

import pytest
import torch

from capture_hooks.errors import DataError
from capture_hooks.spec import CaptureSpec
from capture_hooks.store import Example, Examples, ModelStates, read_examples
from capture_hooks.store.data.examples import check_text_alone
from capture_hooks.testing import tiny, tiny_vision

pytest.importorskip("PIL", reason="images need pillow")
ANSWER = {"role": "assistant", "content": "a cat"}
ASKED = {"type": "text", "text": "what is it?"}


@pytest.fixture
def folder(tmp_path):
    """A data folder with one picture, ``a b.png``."""
    tiny_vision.picture(1).save(tmp_path / "a b.png")
    return tmp_path


def read(folder, rows, family="llava", **how):
    file = folder / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    processor = tiny_vision.processor(family)
    return read_examples(file, processor.tokenizer, **({"processor": lambda: processor} | how))


def asked(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}, ANSWER]}


def forms(folder):
    """The same conversation in the forms of OpenAI, Hugging Face, TRL and LLaVA."""
    path = folder / "a b.png"
    encoded = base64.b64encode(path.read_bytes()).decode()
    yield asked({"type": "image_url", "image_url": {"url": "a b.png"}}, ASKED)
    yield asked({"type": "image_url", "image_url": f"file://{str(path).replace(' ', '%20')}"}, ASKED)
    yield asked({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}, ASKED)
    yield asked({"type": "image", "image": str(path)}, ASKED)
    yield asked({"type": "image", "path": "a b.png"}, ASKED)
    yield asked({"type": "image", "url": "./a b.png"}, ASKED)
    yield asked({"type": "image", "base64": encoded}, ASKED)
    yield {**asked({"type": "image"}, ASKED), "images": ["a b.png"]}
    yield {
        "conversations": [
            {"from": "human", "value": "<image>\nwhat is it?"},
            {"from": "gpt", "value": "a cat"},
        ],
        "image": "a b.png",
    }


@pytest.mark.parametrize("family", sorted(tiny_vision.PLACEHOLDERS))
def test_every_form_gives_what_the_processor_gives(family, folder):
    picture = tiny_vision.picture(1)
    reference = tiny_vision.processor(family).apply_chat_template(
        [{"role": "user", "content": [{"type": "image", "image": picture}, ASKED]}, ANSWER],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    rows = list(forms(folder))
    made = read(folder, rows, family)
    assert len(made) == len(rows)
    assert len({example.media.digest for example in made}) == 1
    for example in made:
        assert example.token_ids.tolist() == reference["input_ids"][0].tolist()
        inputs = example.media.inputs()
        assert inputs.keys() == reference.keys()
        assert all(torch.equal(inputs[name], reference[name]) for name in inputs)


def test_an_image_column_of_datasets_gives_the_same(folder):
    datasets = pytest.importorskip("datasets")
    answer = {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]}
    shown = {"role": "user", "content": [{"type": "image"}, ASKED]}
    rows = [{"messages": [shown, answer], "images": [str(folder / "a b.png")]}]
    features = datasets.Dataset.from_list(rows).features.copy()
    features["images"] = datasets.Sequence(datasets.Image())
    datasets.Dataset.from_list(rows).cast(features).save_to_disk(str(folder / "saved"))
    processor = tiny_vision.processor("llava")
    made = read_examples(folder / "saved", processor.tokenizer, processor=lambda: processor)
    plain = read(folder, rows)
    assert made[0].token_ids.tolist() == plain[0].token_ids.tolist()
    assert torch.equal(made[0].media.inputs()["pixel_values"], plain[0].media.inputs()["pixel_values"])


def test_each_turn_in_a_sequence_of_its_own_has_the_images_before_it(folder):
    tiny_vision.picture(2).save(folder / "2.png")
    turns = [
        {"role": "user", "content": [{"type": "image", "image": "a b.png"}, ASKED]},
        ANSWER,
        {"role": "user", "content": [{"type": "image", "image": "2.png"}, ASKED]},
        {"role": "assistant", "content": "a hat"},
    ]
    first, second = read(folder, [{"messages": turns}], turns="each")
    assert [len(first.media.images), len(second.media.images)] == [1, 2]
    decode = tiny_vision.tokenizer("llava").decode
    assert decode(first.token_ids[first.loss_mask]) == "a cat<|im_end|>"
    assert decode(second.token_ids[second.loss_mask]) == "a hat<|im_end|>"


def test_pixels_are_not_kept(folder):
    (example,) = read(folder, [asked({"type": "image", "image": "a b.png"}, ASKED)])
    assert [image.data for image in example.media.images] == [None]
    shutil.copy(folder / "a b.png", folder / "kept.png")
    (folder / "a b.png").unlink()
    with pytest.raises(DataError, match=r"data\.jsonl:1: cannot read the image .*a b\.png: No such file"):
        example.media.inputs()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"type": "image_url", "image_url": {"url": "https://x.org/a.png"}},
            "downloads nothing",
        ),
        ({"type": "image", "image": "s3://bucket/a.png"}, "not on this machine"),
        ({"type": "image", "image": "none.png"}, "cannot read the image .*none.png: No such file"),
        ({"type": "image", "image": "."}, "is not a file"),
        ({"type": "image", "image": "data.jsonl"}, "cannot be decoded"),
        ({"type": "image", "image": "cut.png"}, "cannot be decoded"),
        ({"type": "image", "image": "data:image/png;base64,@@"}, "is not base64"),
        ({"type": "image", "image": "data:image/png,raw"}, "reads data:image/png;base64"),
        ({"type": "image", "image": 7}, "image"),
        ({"type": "image", "image": "a\0b"}, "cannot read the image"),
        ({"type": "image"}, "names no image"),
        ({"type": "image", "image": "a b.png", "url": "a b.png"}, "several images"),
        ({"type": "video", "video": "a.mp4"}, "a part of type 'video'"),
        ({"type": "input_audio", "input_audio": {}}, "a part of type 'input_audio'"),
        ({"type": "text", "text": "<image>"}, "refuses this conversation|stands for"),
    ],
)
def test_what_cannot_be_shown_is_named_and_can_be_left_out(folder, part, message):
    (folder / "cut.png").write_bytes((folder / "a b.png").read_bytes()[:200])
    good = asked({"type": "image", "image": "a b.png"}, ASKED)
    rows = [asked(part, {"type": "image", "image": "a b.png"}), good]
    with pytest.raises(DataError, match=f"data.jsonl:1.*{message}"):
        read(folder, rows)
    assert [example.source.rpartition(":")[2] for example in read(folder, rows, bad_rows="skip")] == ["2"]


def test_the_processors_template_where_the_tokenizer_has_none(folder):
    processor = tiny_vision.processor("llava")
    processor.tokenizer.chat_template = None
    rows = [asked({"type": "image", "image": "a b.png"}, ASKED), asked(ASKED)]
    made = read(folder, rows, processor=lambda: processor)
    wanted = read(folder, rows)
    assert [example.token_ids.tolist() for example in made] == [e.token_ids.tolist() for e in wanted]


def test_images_that_no_message_shows(folder):
    rows = [{**asked(ASKED), "images": ["a b.png"]}]
    with pytest.raises(DataError, match="more images than its messages show"):
        read(folder, rows)


def test_a_target_without_a_processor(folder):
    rows = [asked({"type": "image", "image": "a b.png"}, ASKED)]
    with pytest.raises(DataError, match="the data has images, but the target has no processor"):
        read(folder, rows, processor=lambda: None)
    with pytest.raises(DataError, match="images are not read here"):
        read(folder, rows, processor=None)


def test_a_processor_that_does_not_say_where_it_puts_images(folder):
    class Silent(type(tiny_vision.processor("llava"))):
        def __call__(self, *args, return_text_replacement_offsets=False, **kwargs):
            return super().__call__(*args, **kwargs)

    processor = tiny_vision.processor("llava")
    processor.__class__ = Silent
    with pytest.raises(DataError, match="Silent does not tell where it puts images"):
        read(folder, [asked({"type": "image", "image": "a b.png"}, ASKED)], processor=lambda: processor)


def test_a_conversation_with_images_is_left_out_where_it_is_too_long(folder):
    rows = [
        asked({"type": "image", "image": "a b.png"}, ASKED),
        {"messages": [{"role": "user", "content": "x"}, ANSWER]},
    ]
    made = read(folder, rows, max_length=34, too_long="truncate")
    assert (len(made), made.skipped, made.truncated) == (1, 1, 0)


def test_an_image_at_the_very_beginning(folder):
    """A trial puts another token into the answer: never one of an image."""
    processor = tiny_vision.processor("llava")
    processor.tokenizer.chat_template = (
        "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
        "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}"
        "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}"
    )
    file = folder / "data.jsonl"
    file.write_text(json.dumps(asked({"type": "image", "image": "a b.png"}, ASKED)))
    made = read_examples(file, processor.tokenizer, processor=lambda: processor)
    assert made[0].token_ids[0] == 260
    ModelStates(tiny.model("llava"), CaptureSpec.parse("post.1"), made)


def test_tokens_of_an_image_that_is_not_there(folder):
    ids = torch.tensor([5, 260, 7, 8])
    data = Examples("ids", (Example(ids, torch.ones(4, dtype=torch.bool), "ids:1"),))
    with pytest.raises(DataError, match="ids:1: token 260 stands for an image"):
        ModelStates(tiny.model("llava"), CaptureSpec.parse("post.1"), data)


def test_engines_that_are_sent_token_ids_alone(folder):
    made = read(folder, [asked({"type": "image", "image": "a b.png"}, ASKED)])
    with pytest.raises(DataError, match="1 of 1 sequences have images, which are not sent to sglang"):
        check_text_alone(made, "sglang")
