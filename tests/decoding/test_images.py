"""Prompts with images decode to the text of ``model.generate``, whatever the head drafts."""

import pytest
import torch

from capture_hooks.capture import bind
from capture_hooks.decoding import SpeculativeDecoder, TreeShape
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
