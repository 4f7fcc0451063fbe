"""A sequence run through a worker of vLLM's before there is a scheduler, in passes of our choosing.

Each pass is a request of its own that finds the tokens before it in the cache, as one that shares a prefix
does.  vLLM's warm-up of its second runner builds ``SchedulerOutput`` by hand in the same way
(``vllm/v1/worker/gpu/warmup.py``, 0.32.0).  Blocks are taken from the beginning of the cache, of which
nothing is in use yet; the scheduler will find them as it finds all others, empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from capture_hooks.errors import EngineError

#: Told what a pass hands to the drafter, by the names of ``propose``'s arguments.
Seen = Callable[[dict[str, Any]], Any]


class Passes:
    """Passes over one sequence; `run` makes one of each.

    Args:
        worker: vLLM's, complete.
        tokens: the sequence.
    """

    _numbers = itertools.count()

    def __init__(self, worker: Any, tokens: Sequence[int]) -> None:
        self._worker, self._tokens = worker, [int(token) for token in tokens]
        config = worker.model_runner.kv_cache_config
        length = len(self._tokens) + worker.vllm_config.num_lookahead_tokens + 1
        fresh = itertools.count(1)  # block 0 stands for none
        self._blocks = tuple(
            [next(fresh) for _ in range(-(-length // group.kv_cache_spec.block_size))]
            for group in config.kv_cache_groups
        )
        if next(fresh) > config.num_blocks:
            raise EngineError(
                f"the cache holds {config.num_blocks} blocks, too few for {len(self._tokens)} tokens"
            )

    def extend(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Prefill tokens start to end, those before them cached; see `_run`."""
        return self._run(self._tokens, start, end - start, [])

    def verify(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Verify ``count - 1`` tokens, as if drafted behind token ``start``; see `_run`."""
        drafted = self._tokens[start + 1 : start + count]
        return self._run(self._tokens[: start + 1], start, count, drafted)

    def _run(self, prompt: list[int], cached: int, count: int, drafted: list[int]) -> tuple[Tensor, Tensor]:
        """States [count, K*H] that reached the drafter, and the positions [count] that they are of.

        Raises:
            EngineError: nothing did, or other tokens' states.
        """
        from vllm import SamplingParams
        from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

        name = f"capture-hooks-witness-{next(self._numbers)}"
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [
            NewRequestData(
                req_id=name,
                prompt_token_ids=prompt,
                mm_features=[],
                sampling_params=SamplingParams(temperature=0.0, max_tokens=2),
                pooling_params=None,
                block_ids=tuple(list(blocks) for blocks in self._blocks),
                num_computed_tokens=cached,
                lora_request=None,
            )
        ]
        output.num_scheduled_tokens = {name: count}
        output.total_num_scheduled_tokens = count
        output.num_spec_tokens_to_schedule = self._worker.model_runner.num_spec_tokens
        output.num_common_prefix_blocks = [0] * len(self._blocks)
        if drafted:
            output.scheduled_spec_decode_tokens = {name: drafted}
        found: list[dict[str, Any]] = []
        over = SchedulerOutput.make_empty()
        over.finished_req_ids = {name}
        with _watching(self._worker.model_runner.drafter, found.append):
            self._worker.execute_model(output)
            self._worker.sample_tokens(None)
            self._worker.execute_model(over)
        return self._states(found, cached, count)

    def _states(self, found: list[dict[str, Any]], cached: int, count: int) -> tuple[Tensor, Tensor]:
        if len(found) != 1:
            raise EngineError(f"a pass over {count} tokens called the drafter {len(found)} times")
        states, ids = found[0]["target_hidden_states"], found[0]["target_token_ids"]
        positions = found[0]["target_positions"]
        positions = (positions[0] if positions.ndim > 1 else positions).cpu()
        wanted = self._tokens[cached : cached + count]
        if ids is not None and ids.tolist() != wanted:
            raise EngineError(f"a pass over {count} tokens from {cached} on handed over other tokens")
        if len(states) != count or positions.tolist() != list(range(cached, cached + count)):
            raise EngineError(
                f"a pass over tokens {cached} to {cached + count - 1} handed over {len(states)} rows, at "
                f"positions {positions.tolist()}"
            )
        return states.float().cpu().clone(), positions


@contextmanager
def _watching(drafter: Any, seen: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    """Note what ``propose`` is called with; it goes on as ever."""
    propose = drafter.propose

    def noted(*args: Any, **arguments: Any) -> Any:
        seen(arguments)
        return propose(*args, **arguments)

    drafter.propose = noted
    try:
        yield
    finally:
        drafter.__dict__.pop("propose")
        if drafter.propose != propose:  # it was set on the object before
            drafter.propose = propose


def layers_of(model: Any) -> tuple[int, ...]:
    """The layer ids that a target was told, as the module that runs the layers keeps them; empty for none."""
    kept = (getattr(module, "aux_hidden_state_layers", ()) for module in model.modules())
    return next((tuple(layers) for layers in kept if layers), ())


@contextmanager
def every_boundary(worker: Any, boundaries: Sequence[int]) -> Iterator[None]:
    """Capture ``boundaries`` instead of the head's, layer by layer and without the drafter.

    Compiled code and CUDA graphs hold the head's own list: neither is used meanwhile.
    """
    runner = worker.model_runner
    model, drafter = runner.get_model(), runner.drafter
    before = layers_of(model)
    compiled = [m for m in model.modules() if getattr(m, "do_not_compile", None) is False]
    graphs = runner.cudagraph_dispatcher.keys_initialized

    def nothing(*args: Any, **arguments: Any) -> Tensor:
        return torch.zeros(1, runner.num_spec_tokens, dtype=torch.int32, device=runner.device)

    model.set_aux_hidden_state_layers(tuple(boundaries))
    drafter.propose = nothing
    runner.cudagraph_dispatcher.keys_initialized = False
    for module in compiled:
        module.do_not_compile = True
    try:
        yield
    finally:
        for module in compiled:
            module.do_not_compile = False
        runner.cudagraph_dispatcher.keys_initialized = graphs
        del drafter.propose
        model.set_aux_hidden_state_layers(before)
