"""SGLang's model runner in this process: no scheduler, no server, no subprocess.

One per process, since SGLang keeps much of its state in module globals.  Requests are extended
(whole prompts, or chunk by chunk) and decoded in batches, as SGLang's scheduler would.

Follows ``sglang.benchmark.one_batch`` (0.5.21 to 0.5.23), which does the same for its latency benchmark.
"""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class InProcess:
    """A loaded model and its KV cache.

    Args:
        path: a model directory.
        attention_backend: SGLang's name of it.
        settings: further fields of SGLang's ``ServerArgs``.
    """

    def __init__(self, path: str, attention_backend: str = "torch_native", **settings: Any) -> None:
        from sglang.benchmark import one_batch
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import (
            PortArgs,
            ServerArgs,
        )

        load_plugins()
        defaults = {
            "device": "cpu",
            "dtype": "float32",
            "max_total_tokens": 2048,
            "max_running_requests": 16,
            "disable_cuda_graph": True,
            "disable_radix_cache": True,
            "log_level": "error",
            "random_seed": 0,
        }
        arguments = ServerArgs(
            model_path=path, attention_backend=attention_backend, **{**defaults, **settings}
        )
        ports = PortArgs.init_new(arguments)
        self._prepare(one_batch, arguments)
        self._one_batch = one_batch
        self._bench, self.tokenizer = one_batch.load_model(arguments, ports, 0, 0)
        #: SGLang's ``ModelRunner``.
        self.runner: Any = getattr(self._bench, "torch_runner", self._bench)
        #: The model as SGLang built it.
        self.model: nn.Module = self.runner.model
        self._ids = itertools.count()

    @staticmethod
    def _prepare(one_batch: Any, arguments: Any) -> None:
        """The process-wide settings that differ between SGLang's versions."""
        if hasattr(arguments, "resolve"):
            arguments.resolve()
        if hasattr(one_batch, "publish"):
            ranks = one_batch.SpawnRanks(
                world_rank=one_batch.spawn_world_rank(arguments, tp_rank=0, pp_rank=0), gpu_id=0
            )
            one_batch.publish(arguments, role="scheduler", ranks=ranks)
        if hasattr(one_batch, "_init_process_global_configs"):
            one_batch._init_process_global_configs()
            return
        for name in ("initialize_moe_config", "initialize_fp8_gemm_config", "initialize_fp4_gemm_config"):
            if hasattr(one_batch, name):
                getattr(one_batch, name)()

    def requests(self, prompts: Iterable[Sequence[int]], first: int | None = None) -> list[Any]:
        """New requests; with ``first`` only so many tokens of each belong to the next extend."""
        made = self._one_batch.prepare_synthetic_inputs_for_latency_test(
            0, 0, [array.array("q", prompt) for prompt in prompts]
        )
        for request in made:
            request.rid = f"request-{next(self._ids)}"
            if first is not None:
                self._cut(request, first)
        return list(made)

    def extend(self, requests: Sequence[Any]) -> tuple[Tensor, Tensor, Any]:
        """Prefill what of the requests is not in the cache; next tokens [R], logits [R, vocab], batch."""
        with torch.no_grad():
            tokens, logits, batch = self._bench.extend(list(requests))
        return tokens, logits, batch

    def extend_further(self, requests: Sequence[Any], upto: int | None = None) -> tuple[Tensor, Tensor, Any]:
        """The next chunk of requests that were extended in part: up to ``upto`` tokens, or all."""
        for request in requests:
            done = request.extend_end
            if hasattr(request, "prefix_len"):
                request.prefix_len = done
            else:  # up to 0.5.21 a request carries the slots of its cached tokens
                pool = self.runner.req_to_token_pool.req_to_token
                request.prefix_indices = pool[request.req_pool_idx, :done].to(torch.int64)
            self._cut(request, len(request.origin_input_ids) if upto is None else upto)
        return self.extend(requests)

    def decode(self, tokens: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """One token for each request of ``batch``; next tokens [R], logits [R, vocab]."""
        with torch.no_grad():
            following, logits = self._bench.decode(tokens, batch)
        return following, logits

    def clear(self) -> None:
        """Empty the KV cache and free every request's slot."""
        self._bench.clear()

    @staticmethod
    def _cut(request: Any, end: int) -> None:
        request.extend_end = min(end, len(request.origin_input_ids))
