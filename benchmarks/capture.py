"""What capturing three points costs: against raw torch hooks, ``output_hidden_states=[...]`` and nnsight.

    python benchmarks/capture.py [--rounds 40] [--json]

Two parts.  *Fixed cost*: a model of identity modules, so that a forward is nothing but its hooks; the
smallest time of many short series of each method, interleaved.  *Ratio*: a random Llama (8 layers, 256 wide)
over 512 tokens; all methods in random order in every round, each against the plain forward of that round:
median ratio with a 95 % bootstrap interval over rounds.  Times are process CPU times on one thread, as wall
time on a shared machine says little.  nnsight and transformers alter a model for good, so each has a copy;
nnsight is left out when missing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from capture_hooks import bind
from capture_hooks.capture import Anatomy

LAYERS, WIDTH, TOKENS, CAPTURED = 8, 256, 512, (1, 3, 4)
SPEC = ", ".join(f"post.{k}" for k in CAPTURED)
Method = Callable[[], Any]


class Identities(nn.Module):
    """A decoder whose layers do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity() for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    with torch.no_grad():
        fixed = fixed_cost()
        ratios, retained = ratio(args.rounds)
    if args.json:
        print(json.dumps({"fixed_us": fixed, "ratio": ratios, "retained_bytes": retained}, indent=2))
        return
    print("fixed cost per forward, µs over the plain forward")
    for name, cost in fixed.items():
        print(f"  {name:32} {cost:6.1f}")
    print(
        f"CPU time over the plain forward's ({TOKENS} tokens, {args.rounds} rounds): median [95 % interval]"
    )
    for name, (middle, low, high) in ratios.items():
        kept = f"   {retained[name]} bytes kept" if name in retained else ""
        print(f"  {name:32} {middle:.3f} [{low:.3f}, {high:.3f}]{kept}")
    wanted = TOKENS * len(CAPTURED) * WIDTH * 4
    print(
        f"requested: {wanted} bytes; stopping after layer {CAPTURED[-1]} of {LAYERS} leaves "
        f"{(CAPTURED[-1] + 1) / LAYERS:.3f} of the layers"
    )


def fixed_cost(series: int = 60, forwards: int = 1500) -> dict[str, float]:
    """Smallest CPU time of a forward, less the plain one's; each method sets up and tears down by itself."""
    model, x = Identities(), torch.randn(1, 1, 64)
    session = bind(model, SPEC, anatomy=_identity_anatomy(model))
    kept: dict[int, Tensor] = {}

    def hook(k: int, keep: Callable[[Tensor], Tensor]) -> Any:
        def store(module: nn.Module, args: Any, output: Tensor) -> None:
            kept[k] = keep(output)

        return model.layers[k].register_forward_hook(store)

    @contextlib.contextmanager
    def hooked(keep: Callable[[Tensor], Tensor]) -> Any:
        handles = [hook(k, keep) for k in CAPTURED]
        yield
        for handle in handles:
            handle.remove()

    def raw_each_time() -> None:
        with hooked(lambda output: output):
            model(x)

    def raw_packed() -> None:
        model(x)
        kept[-1] = torch.cat([kept[k] for k in CAPTURED], dim=-1)

    def captured_each_time() -> None:
        with session:
            model(x)

    methods: dict[str, tuple[Any, Method]] = {
        "plain": (contextlib.nullcontext, lambda: model(x)),
        "raw hooks (aliases)": (lambda: hooked(lambda output: output), lambda: model(x)),
        "raw hooks, cloned and packed": (lambda: hooked(Tensor.clone), raw_packed),
        "bind, attached": (lambda: session, lambda: model(x)),
        "raw hooks, register and remove": (contextlib.nullcontext, raw_each_time),
        "bind, enter and leave": (contextlib.nullcontext, captured_each_time),
    }
    best = dict.fromkeys(methods, float("inf"))
    for _ in range(series):
        for name in random.sample(list(methods), len(methods)):
            around, method = methods[name]
            with around():
                start = time.process_time()
                for _ in range(forwards):
                    method()
                best[name] = min(best[name], (time.process_time() - start) / forwards)
    return {name: 1e6 * (cost - best["plain"]) for name, cost in best.items() if name != "plain"}


def ratio(rounds: int) -> tuple[dict[str, tuple[float, float, float]], dict[str, int]]:
    """Paired CPU-time ratios to the plain forward, and what each method keeps in memory."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 256, (1, TOKENS))
    session = bind(model, SPEC)

    def plain() -> None:
        model(input_ids=ids, use_cache=False)

    def raw() -> list[Tensor]:
        kept: list[Tensor] = []
        hooks = [
            model.model.layers[k].register_forward_hook(lambda m, a, output: kept.append(output))
            for k in CAPTURED
        ]
        model(input_ids=ids, use_cache=False)
        for handle in hooks:
            handle.remove()
        return kept

    def captured() -> list[Tensor]:
        with session:
            model(input_ids=ids, use_cache=False)
        return [session.states.packed]

    def stopped() -> list[Tensor]:
        with session:
            session.run(input_ids=ids, stop=True)
        return [session.states.packed]

    def selected() -> list[Tensor]:
        ours = [k + 1 for k in CAPTURED]
        states = hf(input_ids=ids, use_cache=False, output_hidden_states=ours).hidden_states
        return [state for state in states if state is not None]

    hf = copy.deepcopy(model)  # transformers leaves its own hooks installed after the first call
    methods: dict[str, Method] = {
        "plain": plain,
        "raw hooks": raw,
        "bind": captured,
        f"bind, stop after layer {CAPTURED[-1]}": stopped,
        "output_hidden_states=[...]": selected,
    }
    if (traced := _nnsight(copy.deepcopy(model), ids)) is not None:
        methods["nnsight trace, .save()"] = traced
    else:
        print("nnsight is not installed: left out")
    retained = {
        name: sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in method()}.values())
        for name, method in methods.items()
        if name != "plain"
    }
    times: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for name in random.sample(list(methods), len(methods)):
            start = time.process_time()
            methods[name]()
            times[name].append(time.process_time() - start)
    return {
        name: _interval(taken, times["plain"]) for name, taken in times.items() if name != "plain"
    }, retained


def _interval(taken: list[float], plain: list[float], draws: int = 2000) -> tuple[float, float, float]:
    ratios = [a / b for a, b in zip(taken, plain, strict=True)]
    medians = sorted(statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(draws))
    return statistics.median(ratios), medians[int(0.025 * draws)], medians[int(0.975 * draws)]


def _nnsight(model: nn.Module, ids: Tensor) -> Method | None:
    try:
        from nnsight import NNsight
    except ModuleNotFoundError:
        return None
    wrapped = NNsight(model)

    def trace() -> list[Tensor]:
        kept = []
        with wrapped.trace(input_ids=ids, use_cache=False):
            first = wrapped.model.layers[CAPTURED[0]].output.save()
            second = wrapped.model.layers[CAPTURED[1]].output.save()
            third = wrapped.model.layers[CAPTURED[2]].output.save()
        kept += [first, second, third]
        return kept

    return trace


def _identity_anatomy(model: Identities) -> Anatomy:
    return Anatomy(
        model=model,
        decoder=model,
        decoder_name="",
        layers=tuple(model.layers),
        layer_names=tuple(f"layers.{k}" for k in range(LAYERS)),
        embedding=model.layers[0],
        final_norm=None,
        final_norm_name=None,
        lm_head=model.layers[-1],
        hidden_size=64,
        vocab_size=64,
    )


if __name__ == "__main__":
    main()
