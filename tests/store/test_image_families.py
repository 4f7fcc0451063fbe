"""More vision families: other processors, grids, tiles and layers, each against a plain forward."""

import pytest
import torch
import transformers

from capture_hooks.capture import find_anatomy
from capture_hooks.spec import CaptureSpec
from capture_hooks.store.data.images import Vision, image_source
from capture_hooks.target.states import BatchForward
from capture_hooks.testing import tiny, tiny_vision
from capture_hooks.testing.tiny_families import FAMILIES, HIDDEN

pytest.importorskip("PIL", reason="images need pillow")
TEXT = {**FAMILIES["llava"].settings}
VIT = {**FAMILIES["llava"].outer["vision_config"]}
QWEN = FAMILIES["qwen3_vl"]
TOKENS = {name: value for name, value in QWEN.outer.items() if name != "vision_config"}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
SQUARE = {"height": 16, "width": 16}
GRIDS = [[16, 32], [32, 16], [32, 32]]


def without_video(cls):
    """A processor whose video half needs torchvision, without that half."""

    class Made(cls):
        def check_argument_for_proper_class(self, name, argument):
            if name != "video_processor":
                super().check_argument_for_proper_class(name, argument)

    return Made


def llava_next():
    """Several tiles of an image, by its own size."""
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 16}, crop_size=SQUARE, image_grid_pinpoints=GRIDS
    )
    tokens = tiny_vision.tokenizer("llava")
    processor = transformers.LlavaNextProcessor(
        images,
        tokens,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=tokens.chat_template,
    )
    outer = {"vision_config": VIT, "image_token_index": 260, "image_grid_pinpoints": GRIDS}
    return processor, transformers.LlavaNextConfig(text_config=TEXT, **outer)


def qwen2_vl():
    """M-RoPE of the first generation."""
    vision = {"depth": 2, "embed_dim": 16, "hidden_size": HIDDEN, "num_heads": 2, "mlp_ratio": 2}
    vision |= {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
    text = {**TEXT, "model_type": "qwen2_vl_text", "rope_parameters": MROPE}
    config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **TOKENS)
    return _qwen(transformers.Qwen2VLProcessor), config


def qwen3_5():
    """Linear attention in every second layer."""
    text = {**QWEN.settings, "model_type": "qwen3_5_text"}
    text["rope_parameters"] = {**MROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
    text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    text |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"] * 3}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=QWEN.outer["vision_config"], **TOKENS)
    return _qwen(transformers.Qwen3VLProcessor), config


def internvl():
    """Crops of an image; a processor that merges what its base class returns."""
    named = ("context_image_token", "<image>"), ("video_token", "<video>")
    named += ("start_image_token", "<img>"), ("end_image_token", "</img>")
    tokens = tiny.tokenizer(
        tiny_vision.tokenizer("llava").chat_template, {"unused_token": "<|unused|>", **dict(named)}
    )
    images = transformers.GotOcr2ImageProcessorPil(
        size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=3
    )
    processor = without_video(transformers.InternVLProcessor)(
        images, tokens, None, image_seq_length=4, chat_template=tokens.chat_template
    )
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": [16, 16], "patch_size": [4, 4]}
    text = {**TEXT, "model_type": "qwen2"}
    config = transformers.InternVLConfig(
        text_config=text, vision_config=vision, image_token_id=260, downsample_ratio=0.5
    )
    return processor, config


def _qwen(cls):
    tokens = tiny_vision.tokenizer("qwen2_5_vl")
    images = transformers.Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=1024)
    return without_video(cls)(images, tokens, None, chat_template=tokens.chat_template)


@pytest.mark.parametrize("made", [llava_next, qwen2_vl, qwen3_5, internvl])
def test_states_are_those_of_a_plain_forward(made, tmp_path):
    processor, config = made()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config).eval()
        tiny.randomise(model)
    pictures = [tiny_vision.picture(1), tiny_vision.picture(2, 40, 16)]
    messages = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": pictures[0]},
                {"type": "text", "text": "what\n"},
                {"type": "image", "image": pictures[1]},
                {"type": "text", "text": "\nis it?"},
            ],
        },
        {"role": "assistant", "content": "a cat"},
    ]
    reference = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    text = processor.apply_chat_template(messages, tokenize=False)
    for number, picture in enumerate(pictures):
        picture.save(tmp_path / f"{number}.png")
    sources = [image_source("row", f"{number}.png", tmp_path) for number in range(2)]
    seen = Vision(processor).read("row", text, sources)
    assert seen.ids == reference["input_ids"][0].tolist()
    start = text.index("a cat")
    learnt = seen.ids[seen.edge(start) : seen.edge(start + len("a cat<|im_end|>"))]
    assert processor.tokenizer.decode(learnt) == "a cat<|im_end|>"
    assert {seen.ids[at] for at in seen.of_images} >= {260}

    anatomy = find_anatomy(model)
    target = BatchForward(model, CaptureSpec.parse("post.1, post.4"), anatomy)
    with target.session:
        captured = target.capture_images(seen.media.inputs())
    found = {}
    handles = [
        anatomy.layers[k].register_forward_hook(
            lambda module, args, output, k=k: found.update(
                {k: output[0] if isinstance(output, tuple) else output}
            )
        )
        for k in (1, 4)
    ]
    with torch.no_grad():
        logits = model(**reference).logits
    for handle in handles:
        handle.remove()
    wanted = torch.cat([found[1], found[4]], dim=-1)
    torch.testing.assert_close(captured.states, wanted, rtol=0, atol=2e-6)
    assert captured.argmax.tolist() == logits[0].argmax(-1).tolist()
