"""vLLM's own hidden-states connector, also where the states lie in a CPU's memory.

``ExampleHiddenStatesConnector`` (0.32.0) copies a finished request's states from the cache through pinned
memory on a CUDA stream, which a CPU has not.  This module is imported by vLLM's scheduler and workers
(``kv_connector_module_path``), never here.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import (
    ExampleHiddenStatesConnector,
    PendingSave,
    extract_from_kv_cache,
)


class HiddenStatesConnector(ExampleHiddenStatesConnector):  # type: ignore[misc, unused-ignore]
    """Leaves a file for each finished request: ``hidden_states`` [T, K, H], ``token_ids`` [T]."""

    def _submit_async_write(self, pending: PendingSave) -> None:
        if self._kv_cache is None or not self._kv_cache.is_cpu:
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        blocks = torch.tensor(pending.block_ids, dtype=torch.long)
        slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
        states = extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        # Copied before the blocks are given to another request.
        tensors = {"hidden_states": states.clone(), "token_ids": pending.token_ids.clone()}
        os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
        copied: Any = _Copied()
        future = self._executor.submit(
            self._write_tensors, tensors, copied, pending.filename, self._lock_fds.pop(pending.req_id, None)
        )
        self._req_copy_events[pending.req_id] = copied
        self._req_futures[pending.req_id] = future
        future.add_done_callback(functools.partial(self._on_write_done, pending.req_id))


class _Copied:
    """The event of a copy that is over."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass
