"""The operators SGLang 0.5.23 imports from ``sgl_kernel`` on a CPU, in plain torch: correct first.

SGLang's own kernel library has no build for CPUs without AMX.  This one serves tests, in its place:
`pools` (request and token pools, cache locations), `tree` and `verify` (EAGLE), `attention`, and
`hashing`.  It refuses to load where the real library or a GPU is present.

Whatever it lacks can be imported, as SGLang does at the top of many modules, and raises when called.

Raises:
    ImportError: on import, where a real kernel library is installed or registered, or CUDA is available.
"""

from typing import Any

from . import refuse

refuse.where_real_kernels_exist()

from . import ops  # noqa: E402  (registers operators: only after the refusal)
from .pools import (  # noqa: E402
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from .tree import build_tree_kernel_efficient_cpu  # noqa: E402
from .verify import verify_tree_greedy_cpu  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

ops.register()


def __getattr__(name: str) -> Any:
    return refuse.missing(__name__, name)
