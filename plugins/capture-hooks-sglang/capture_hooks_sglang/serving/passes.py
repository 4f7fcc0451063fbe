"""One sequence through a loaded target, pass by pass, as the scheduler and the EAGLE worker run it.

Beside the scheduler, not through it: no radix tree sees these tokens, and everything allocated is freed.
Follows ``ScheduleBatch.prepare_for_extend`` and ``eagle_prepare_for_verify`` of SGLang 0.5.23.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from capture_hooks.errors import EngineError


class _NoTree(SimpleNamespace):
    """Stands where the scheduler's prefix cache does: nothing is shared, nothing is evicted."""

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def supports_prefix_sharing(self) -> bool:
        return True

    def evict(self, params: Any) -> None:
        pass

    def maybe_hand_to_session(self, req: Any) -> None:
        pass


class CachedSequence:
    """One sequence of tokens in the target's KV cache.

    Args:
        worker: SGLang's ``TpModelWorker`` of the target.
        token_ids: the whole sequence.
    """

    def __init__(self, worker: Any, token_ids: Sequence[int]) -> None:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._worker, self._runner = worker, worker.model_runner
        self._token_ids = [int(token) for token in token_ids]
        room = self._runner.req_to_token_pool.max_context_len
        if len(self._token_ids) > room:
            raise EngineError(
                f"a sequence of {len(self._token_ids)} tokens does not fit the server's context of {room}"
            )
        self._request = Req(
            rid="capture-hooks-witness",
            origin_input_text="",
            origin_input_ids=array.array("q", self._token_ids),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        )
        self._request.full_untruncated_fill_ids = self._request.origin_input_ids
        self._request.logprob_start_len = -1
        self._request.extend_end = 0
        self._batch: Any = None

    @torch.no_grad()
    def extend(self, upto: int) -> Tensor:
        """Prefill to ``upto`` tokens; the states stored for those that are new, [new, width]."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        runner, request = self._runner, self._request
        done, request.extend_end = request.extend_end, upto
        if done:
            row = runner.req_to_token_pool.req_to_token[request.kv.req_pool_idx, :done]
            request.prefix_indices = row.to(torch.int64)
            request.prefix_len = done
        self._batch = batch = ScheduleBatch.init_new(
            reqs=[request],
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=_NoTree(
                page_size=runner.page_size,
                device=runner.device,
                token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            ),
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        batch.prepare_for_extend()
        if batch.input_ids is None:
            batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
            batch.prefill_input_ids_cpu = None
        result = self._worker.forward_batch_generation(batch, capture_hidden_mode=CaptureHiddenMode.FULL)
        return self._stored(result)

    @torch.no_grad()
    def verify(self, start: int, count: int) -> Tensor:
        """Tokens ``start .. start+count-1`` again, as a chain of drafts to be verified; [count, width].

        The sequence must have been extended beyond them: their places in the KV cache are used again.
        """
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
        from sglang.srt.speculative.eagle_info import EagleVerifyInput
        from sglang.srt.speculative.eagle_utils import (
            build_tree_kernel_efficient,
            default_tree_mask_mode,
            eagle_prepare_for_verify,
        )

        runner, batch = self._runner, self._batch
        device = torch.device(runner.device)
        tokens = torch.tensor([self._token_ids[start : start + count]], dtype=torch.int64, device=device)
        batch.seq_lens = torch.tensor([start], dtype=torch.int64, device=device)
        batch.seq_lens_cpu = torch.tensor([start], dtype=torch.int64)
        batch.seq_lens_sum = start
        # A chain: draft i hangs on draft i-1, whose number in the flattened tree is its own.
        mask = runner.attn_backend.verify_mask
        mode = default_tree_mask_mode() if mask is None else mask.mode
        chain = torch.arange(count - 1, dtype=torch.int64, device=device).unsqueeze(0)
        parents = torch.arange(-1, count - 2, dtype=torch.int64, device=device).unsqueeze(0)
        tree_mask, positions, index, next_token, next_sibling, drafts = build_tree_kernel_efficient(
            tokens[:, 0],
            parents,
            chain,
            tokens[:, 1:],
            batch.seq_lens,
            start,
            1,
            count - 1,
            count,
            mode,
            mask.buffer if mask is not None and mask.fits(1) else None,
        )
        batch.spec_info = EagleVerifyInput(
            draft_token=drafts,
            custom_mask=tree_mask,
            positions=positions,
            retrieve_index=index,
            retrieve_next_token=next_token,
            retrieve_next_sibling=next_sibling,
            retrieve_cum_len=None,
            spec_steps=count - 1,
            topk=1,
            draft_token_num=count,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            seq_lens_sum=start,
            seq_lens_cpu=batch.seq_lens_cpu,
        )
        forward_batch, _ = eagle_prepare_for_verify(
            batch.spec_info, runner.req_to_token_pool, batch, self._worker
        )
        result = self._worker.forward_batch_generation(None, forward_batch=forward_batch, is_verify=True)
        return self._stored(result)

    def free(self) -> None:
        """Give back the sequence's places in the KV cache."""
        runner, request = self._runner, self._request
        if request.extend_end:
            pool = runner.req_to_token_pool
            runner.token_to_kv_pool_allocator.free(
                pool.req_to_token[request.kv.req_pool_idx, : request.extend_end].to(torch.int64)
            )
            pool.free(request)

    @staticmethod
    def _stored(result: Any) -> Tensor:
        states = result.logits_output.hidden_states
        if states is None:
            raise EngineError("SGLang stored no states in a forward that asks for all of them")
        found: Tensor = states.detach().float().cpu()
        return found
