"""Prompts with images decode to the text of ``model.generate``, whatever the head drafts."""

import json

import pytest
import torch

from capture_hooks.capture import bind
from capture_hooks.decoding import SpeculativeDecoder, TreeShape, evaluate, read_prompts
from capture_hooks.decoding.evaluation import compare
from capture_hooks.heads.contract import TrainBatch
from capture_hooks.testing import tiny, tiny_vision

pytest.importorskip("PIL", reason="images need pillow")
FAMILIES = sorted(tiny_vision.PLACEHOLDERS)


@pytest.fixture
def recalling_head(knowing_head):
    """Drafts a known text, with a wrong token at every third place."""

    def make(model, text):
        head = knowing_head(model, text[0], 1.0)
        head.check_states = False  # its own reference reads tokens alone

        def draft_logits(prefix):
            logits = torch.zeros(tiny.VOCAB)
            right = text[len(prefix)] if len(prefix) < len(text) else 0
            logits[(right + (len(prefix) % 3 == 0)) % tiny.VOCAB] = 5.0
            return logits

        head._draft_logits = draft_logits
        return head

    return make


def prompt(family, *seeds):
    parts = [{"type": "image", "image": tiny_vision.picture(seed, 16 + 8 * seed, 24)} for seed in seeds]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "what is it?"}]}]
    return tiny_vision.processor(family).apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("family", "tree"),
    # Gemma 3's sliding cache keeps one line of tokens, which the decoder says of itself.
    [
        (family, tree)
        for family in FAMILIES
        for tree in (None, TreeShape(4, 2, 6))
        if not (tree and family == "gemma3")
    ],
)
def test_the_text_is_that_of_generate(family, tree, recalling_head):
    model = tiny.model(family)
    seen, text = prompt(family, 1, 2), torch.tensor([[5, 9, 80]])
    answers = [
        model.generate(**inputs, max_new_tokens=24, do_sample=False, eos_token_id=None)
        for inputs in (seen, {"input_ids": text, "attention_mask": torch.ones_like(text)})
    ]
    # The images matter to the answer: a decoder that lost them would give another.
    blind = {**seen, "pixel_values": seen["pixel_values"] * -1}
    assert not torch.equal(
        model.generate(**blind, max_new_tokens=24, do_sample=False, eos_token_id=None), answers[0]
    )
    head = recalling_head(model, answers[0][0].tolist())
    decoder = SpeculativeDecoder(model, head, 4, tree, anatomy=head.anatomy)
    images = {name: value for name, value in seen.items() if name not in ("input_ids", "attention_mask")}
    request = decoder.prepare(seen["input_ids"], 24, do_sample=False, eos_token_id=None, **images)
    # Twice, and a prompt of text alone in between: nothing of a prompt's images stays behind.
    for _ in range(2):
        found = decoder._finish(request, list(decoder.rounds(request)))
        assert torch.equal(found.sequences, answers[0])
        assert found.stats.acceptance_length > 1.5
        plainly = decoder.generate(text, 24, do_sample=False, eos_token_id=None)
        assert torch.equal(plainly.sequences, answers[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_is_given_the_states_of_the_prompt_with_its_images(family, recalling_head):
    model, seen = tiny.model(family), prompt(family, 1)
    head = recalling_head(model, seen["input_ids"][0].tolist())
    given = []
    extend = head.extend
    head.extend = lambda cache, states, ids, start: given.append(states) or extend(cache, states, ids, start)
    decoder = SpeculativeDecoder(model, head, 2, anatomy=head.anatomy)
    given.clear()
    images = {name: value for name, value in seen.items() if name not in ("input_ids", "attention_mask")}
    decoder.generate(seen["input_ids"], 4, do_sample=False, **images)
    with torch.no_grad(), bind(model, head.spec, anatomy=head.anatomy) as capture:
        model(**seen)
    torch.testing.assert_close(given[0], capture.states.packed, rtol=0, atol=2e-6)


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """A file of conversations with images, answered, asked and of text alone."""
    folder = tmp_path_factory.mktemp("asked")
    tiny_vision.picture(1).save(folder / "1.png")
    tiny_vision.picture(2, 30, 16).save(folder / "2.png")
    first = {
        "role": "user",
        "content": [{"type": "image", "image": "1.png"}, {"type": "text", "text": "what?"}],
    }
    second = {
        "role": "user",
        "content": [{"type": "text", "text": "and "}, {"type": "image", "image": "2.png"}],
    }
    answer = {"role": "assistant", "content": "a cat"}
    rows = [[first, answer], [first, answer, second], [{"role": "user", "content": "no image"}, answer]]
    rows = [{"messages": messages} for messages in rows]
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / "asked.jsonl"


@pytest.mark.parametrize("family", FAMILIES)
def test_evaluation_of_prompts_with_images(family, asked, eagle3_head):
    model, processor = tiny.model(family), tiny_vision.processor(family)
    prompts = read_prompts(asked, processor.tokenizer, processor=lambda: processor)
    assert [prompt.media is not None for prompt in prompts] == [True, True, False]
    assert [prompt.answered is not None for prompt in prompts] == [True, False, True]
    assert [len(prompt.media.images) for prompt in prompts[:2]] == [1, 2]
    head = eagle3_head(model)
    report = evaluate(SpeculativeDecoder(model, head, 3), prompts, max_new_tokens=12)
    assert report.lossless
    assert report.identical == 3
    # Offline acceptance is counted on the states of the plain forwards.
    found = None
    for prompt in (prompts[0], prompts[2]):
        with torch.no_grad(), bind(model, head.spec, target=True) as capture:
            if prompt.answered_media is None:
                model(prompt.answered[None])
            else:
                model(**prompt.answered_media.inputs())
        starts = torch.tensor([0, len(prompt.answered)])
        states = capture.states
        batch = TrainBatch(states.packed, states.target, prompt.answered, prompt.loss_mask, starts)
        with torch.no_grad():
            hits = head(batch).hits
        found = hits if found is None else found + hits
    assert report.offline.hits == tuple(found.tolist())


def test_a_wrong_answer_about_an_image_is_no_near_tie(recalling_head):
    model, seen = tiny.model("qwen2_5_vl"), prompt("qwen2_5_vl", 1)
    head = recalling_head(model, seen["input_ids"][0].tolist())
    decoder = SpeculativeDecoder(model, head, 3, anatomy=head.anatomy)
    images = {name: value for name, value in seen.items() if name not in ("input_ids", "attention_mask")}
    ids = seen["input_ids"]
    answer = model.generate(**seen, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    wrong = answer.clone()
    wrong[3] = (wrong[3] + 1) % 200
    inputs = decoder.prepare(ids, 1, **images).inputs
    parted = compare(decoder.target, ids[0], wrong, answer, 4, inputs=inputs)
    assert (parted.position, parted.excused) == (3, False)
    with torch.no_grad():
        whole = torch.cat([ids, answer[None, :3]], dim=1)
        kinds = torch.nn.functional.pad(seen["mm_token_type_ids"], (0, 3))
        best = (
            model(**{**images, "input_ids": whole, "mm_token_type_ids": kinds}).logits[0, -1].topk(2).values
        )
    assert parted.gap == pytest.approx(float(best[0] - best[1]), abs=1e-4)
