"""One SGLang model in this process, measured for `test_sglang_anatomy`: prints one JSON object.

python sglang_capture_worker.py FAMILY
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import sglang_families as families

from capture_hooks import bind
from capture_hooks.capture import Phase, find_anatomy
from capture_hooks.errors import CaptureHooksError

A, B, C = families.PROMPTS[0] * 2, families.PROMPTS[1], (9, 8, 7, 6)


def difference(ours, theirs):
    """Largest difference relative to the largest entry; infinite for other shapes."""
    if ours.shape != theirs.shape:
        return float("inf")
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max())


def layers_of(reference):
    return reference.model.layers


class Truth:
    """The Hugging Face model's stream, by hooks written here."""

    def __init__(self, reference):
        self.reference = reference
        self.seen = {}
        for k, layer in enumerate(layers_of(reference)):
            layer.register_forward_pre_hook(self._entering(k), with_kwargs=True)
        reference.model.norm.register_forward_pre_hook(
            self._entering(len(layers_of(reference))), with_kwargs=True
        )

    def _entering(self, k):
        def hook(module, args, kwargs):
            self.seen[k] = (args[0] if args else kwargs["hidden_states"])[0].detach().clone()

        return hook

    def __call__(self, tokens):
        """[tokens, hidden] at boundaries 0 … n."""
        with torch.no_grad():
            self.reference(torch.tensor([list(tokens)]), use_cache=False)
        return [self.seen[k] for k in range(len(self.seen))]


def rows(engine, anatomy, truth):
    """Two requests in chunks, a third in between, decode steps: each row beside the Hugging Face model's."""
    n = anatomy.n_layers
    spec = f"embed, post.{n - 2}, post.{n - 1}"
    engine.clear()
    with bind(engine.model, spec, target=True, anatomy=anatomy) as capture:
        a, b = engine.requests([A, B], first=3)
        engine.extend([a, b])
        (c,) = engine.requests([C])
        engine.extend([c])
        engine.extend_further([a], upto=9)
        tokens, _, batch = engine.extend_further([a, b])
        given = [tokens.tolist()]
        for _ in range(2):
            tokens, _ = engine.decode(tokens, batch)
            given.append(tokens.tolist())
        states = capture.states
    sequences = [[*A, *(step[0] for step in given[:2])], [*B, *(step[1] for step in given[:2])], list(C)]
    worst = 0.0
    for request, sequence in enumerate(sequences):
        own = states.sequence(request)
        boundaries = truth(sequence)
        for point, k in (("embed", 0), (f"post.{n - 2}", n - 1), (f"post.{n - 1}", n)):
            worst = max(worst, difference(own[point], boundaries[k]))
    own = states.sequence(0)
    return {
        "difference": worst,
        "requests": states.requests,
        "positions": [states.sequence(r).position.tolist() for r in range(states.requests)],
        "packed_order": states.request.tolist(),
        "decoded": int((own.phase == Phase.DECODE).sum()),
    }


def static(engine, anatomy):
    """The same forward into a static buffer and into fresh memory."""
    n, out = anatomy.n_layers, torch.full((64, 2 * anatomy.hidden_size), float("nan"))
    spec = f"embed, post.{n - 1}"
    engine.clear()
    with (
        bind(engine.model, spec, anatomy=anatomy) as fresh,
        bind(engine.model, spec, anatomy=anatomy, out=out) as kept,
    ):
        engine.extend(engine.requests([A, B]))
    states = kept.states
    return {
        "equal": torch.equal(fresh.states.packed, states.packed)
        and torch.equal(out[: len(states)], states.packed),
        "shared": states.packed.untyped_storage().data_ptr() == out.untyped_storage().data_ptr(),
        "positions": states.position.tolist(),
    }


def native(engine, anatomy, truth, calls):
    """SGLang's own auxiliary capture after each of ``calls``, beside ours in the same forward.

    For every tensor that reached the logits processor: the nearest boundary and the difference from it.
    """
    boundaries = truth(A)
    n = anatomy.n_layers
    processor = next(m for m in engine.model.modules() if type(m).__name__ == "LogitsProcessor")
    results = []
    for ids in calls:
        engine.clear()
        engine.model.set_eagle3_layers_to_capture(ids)
        given = {}
        handle = processor.register_forward_pre_hook(
            lambda module, args, kwargs: given.update(aux=kwargs.get("aux_hidden_states", (*args, None)[4])),  # noqa: B023
            with_kwargs=True,
        )
        spec = ", ".join(["embed", *(f"post.{k}" for k in range(n))])
        result = {"ids": ids}
        if max(ids) < n - 1:  # a call that breaks the model's own forward breaks the rehearsal too
            result["layout"] = find_anatomy(engine.model).layout
        with bind(engine.model, spec, anatomy=anatomy) as capture:
            try:
                engine.extend(engine.requests([A]))
                aux = given["aux"]
                aux = list(aux.split(anatomy.hidden_size, -1)) if isinstance(aux, torch.Tensor) else list(aux)
                gaps = [[difference(tensor, b) for b in boundaries] for tensor in aux]
                result["native"] = [(min(range(n + 1), key=gap.__getitem__), min(gap)) for gap in gaps]
            except Exception as error:
                result["error"] = f"{type(error).__name__}: {error}"
            finally:
                handle.remove()
            result["ours"] = max(
                difference(capture.states[p], b)
                for p, b in zip(capture.states.columns, boundaries, strict=True)
            )
        results.append(result)
    return results


def refusals(engine):
    """Messages of bindings that cannot be."""
    from sglang.srt.layers.utils import PPMissingLayer

    messages = {}
    try:
        with bind(engine.model, "in:logits_processor") as capture:
            engine.clear()
            engine.extend(engine.requests([B]))
        messages["outside"] = f"captured {capture.states.packed.shape}"
    except CaptureHooksError as error:
        messages["outside"] = str(error)
    layers = engine.model.model.layers
    kept, layers[1] = layers[1], PPMissingLayer()
    try:
        find_anatomy(engine.model)
    except CaptureHooksError as error:
        messages["pipeline"] = str(error)
    layers[1] = kept
    return messages


def main(family):
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        truth = Truth(families.build(family, folder))
        from capture_hooks_sglang.in_process import InProcess

        engine = InProcess(folder, families.backend(family), context_length=64)
    anatomy = find_anatomy(engine.model)
    everything = ", ".join(["embed", *(f"post.{k}" for k in range(anatomy.n_layers))])
    with bind(engine.model, everything, target=True, anatomy=anatomy) as capture:
        engine.extend(engine.requests([A]))
    states, boundaries = capture.states, truth(A)
    with torch.no_grad():
        normed = truth.reference.model.norm(boundaries[-1])
    report = {
        "layout": anatomy.layout,
        "tied": anatomy.lm_head is anatomy.embedding,
        "logit_scale": anatomy.logit_scale,
        "post": [difference(states[p], b) for p, b in zip(states.columns, boundaries, strict=True)],
        "final_norm": difference(states.target, normed),
        "rows": rows(engine, anatomy, truth),
        "static": static(engine, anatomy),
    }
    report |= {"refusals": refusals(engine)}
    n = anatomy.n_layers
    calls = {"llama": [[0, 1], [n - 1]], "gemma3_text": [[0, 1]], "qwen3_moe": [[0], [1]]}.get(family)
    if calls:
        report["native"] = native(engine, anatomy, truth, calls)
    print("\n" + json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
