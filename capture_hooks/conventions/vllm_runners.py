"""vLLM's V1 and V2 runners, 0.12 to 0.33: where each of them looks for ids, and what it adds to them.

V1 takes the top-level list, then DFlash's, and lets a nested ``eagle_config`` replace DFlash's.  V2, the
default on a GPU, never looks into ``eagle_config`` for that list, but has four keys more.  Either takes the
target's default layers where it finds nothing.  The statements are the runners' own, on purpose: what Python
makes of an odd value is the answer.  ``benchmarks/vllm_versions.py`` compares every version.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from .contract import Rank
from .vllm_reader import TOP, Ids, VllmRunner, listed, of_dict, plus_one

NESTED: Final = f"eagle_config.{TOP}"
DFLASH: Final = "dflash_config.target_layer_ids"
DSPARK: Final = "dspark_target_layer_ids"
DENSE: Final = "target_layer_ids"


class VllmV1(VllmRunner):
    """The top-level list, then DFlash's ids plus one, which a nested ``eagle_config`` replaces, unshifted."""

    name: ClassVar[str] = "vllm.v1"
    versions: ClassVar[str] = "0.30.0 to 0.33.0"
    source: ClassVar[str] = "vllm/v1/worker/gpu_model_runner.py:5190-5224 of 0.33.0; run: 0.32.0"
    rank: ClassVar[Rank] = "verified"
    dspark: ClassVar[bool] = False

    def find(self, draft: Mapping[str, Any], as_is: bool) -> Ids | None:
        """See the class."""
        if top := draft.get(TOP):
            return listed(Ids(TOP, TOP, top))
        found = None
        dflash, eagle = draft.get("dflash_config"), draft.get("eagle_config")
        if dflash and isinstance(dflash, dict):
            found = plus_one(DFLASH, dflash.get("target_layer_ids") or [])
        if eagle and isinstance(eagle, dict):
            found = Ids(TOP, NESTED, eagle.get(TOP))
        return listed(found)


class VllmV1Until29(VllmV1):
    """As `VllmV1`; what is no number in a list is ignored."""

    name = "vllm.v1-0.22"
    versions = "0.22.0 to 0.29.0"
    source = (
        "vllm/v1/worker/gpu_model_runner.py:5225 of 0.22.0; model_executor/models/interfaces.py of 0.29.0"
    )
    rank: ClassVar[Rank] = "read"
    sorts = False


class VllmV1Until21(VllmV1):
    """The top-level list, then DFlash's ids, not shifted: one layer before the one that is meant."""

    name = "vllm.v1-0.20"
    versions = "0.20.0 to 0.21.0"
    source = "vllm/v1/worker/gpu_model_runner.py:4945 of 0.20.2"
    rank: ClassVar[Rank] = "read"
    types = ("eagle3", "dflash")
    layers = None
    sorts = False

    def find(self, draft: Mapping[str, Any], as_is: bool) -> Ids | None:
        """See the class."""
        if top := draft.get(TOP):
            return listed(Ids(TOP, TOP, top))
        dflash = draft.get("dflash_config")
        ids = dflash.get("target_layer_ids") if dflash and isinstance(dflash, dict) else None
        return listed(Ids(TOP, DFLASH, ids))


class VllmV1Until19(VllmV1):
    """The top-level list, and nothing else."""

    name = "vllm.v1-0.12"
    versions = "0.12.0 to 0.19.1"
    source = "vllm/v1/worker/gpu_model_runner.py:3617 of 0.12.0, the same in 0.19.1"
    rank: ClassVar[Rank] = "read"
    types = ("eagle3",)
    layers = None
    sorts = False

    def find(self, draft: Mapping[str, Any], as_is: bool) -> Ids | None:
        """See the class."""
        return listed(Ids(TOP, TOP, draft.get(TOP)))


class VllmV2(VllmRunner):
    """The top-level list; DFlash's, DSpark's and dense DSpark's ids plus one; ``layer_ids`` as they are."""

    name: ClassVar[str] = "vllm.v2"
    versions: ClassVar[str] = "0.33.0"
    source: ClassVar[str] = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:15-22,113-150 of 0.33.0"
    #: Objects whose ``layer_ids`` are taken as they are.
    plain: ClassVar[tuple[str, ...]] = ("dflash_config", "eagle_config")

    def find(self, draft: Mapping[str, Any], as_is: bool) -> Ids | None:
        """See the class."""
        found = Ids(TOP, TOP, draft.get(TOP))
        if not found.value:
            found = plus_one(DFLASH, of_dict(draft, "dflash_config", "target_layer_ids") or [])
        if self.dspark and not found.value and (ids := draft.get(DSPARK)):
            found = Ids(TOP, DSPARK, list(ids)) if as_is else plus_one(DSPARK, ids)
        if self.dspark and not found.value and (ids := draft.get(DENSE)):
            found = plus_one(DENSE, ids)
        for name in self.plain:
            if not found.value:
                found = Ids(TOP, f"{name}.layer_ids", of_dict(draft, name, "layer_ids"))
        return listed(found)


class VllmV2Until32(VllmV2):
    """As `VllmV2`, but ``use_aux_hidden_state`` is not looked at."""

    name = "vllm.v2-0.30"
    versions = "0.30.0 to 0.32.0"
    source = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:100-146 of 0.32.0; run: 0.32.0"
    rank: ClassVar[Rank] = "verified"
    flag = False


class VllmV2Until29(VllmV2):
    """As `VllmV2`; what is no number in a list is ignored, and so is ``use_aux_hidden_state``."""

    name = "vllm.v2-0.27"
    versions = "0.27.0 to 0.29.0"
    source = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:35 of 0.27.0, the same in 0.29.0"
    flag = False
    sorts = False

    def find(self, draft: Mapping[str, Any], as_is: bool) -> Ids | None:
        """See the class; the exception for ``deepseek_v41`` came with 0.30."""
        return super().find(draft, as_is=False)


class VllmV2Until26(VllmV2Until29):
    """As `VllmV2Until29`, without ``layer_ids``."""

    name = "vllm.v2-0.25"
    versions = "0.25.1 to 0.26.0"
    source = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:35 of 0.25.1, the same in 0.26.0"
    plain = ()


class VllmV2Until24(VllmV2Until26):
    """The top-level list, then DFlash's ids plus one."""

    name = "vllm.v2-0.24"
    versions = "0.24.0"
    source = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:35 of 0.24.0"
    dspark = False


class VllmV2Until23(VllmV1Until19):
    """The top-level list, and nothing else."""

    name = "vllm.v2-0.17"
    versions = "0.17.0 to 0.23.0"
    source = "vllm/v1/worker/gpu/spec_decode/eagle/eagle3_utils.py:35 of 0.17.0, the same in 0.23.0"
    flag = False


READERS: Final[tuple[VllmRunner, ...]] = (
    VllmV1(),
    VllmV1Until29(),
    VllmV1Until21(),
    VllmV1Until19(),
    VllmV2(),
    VllmV2Until32(),
    VllmV2Until29(),
    VllmV2Until26(),
    VllmV2Until24(),
    VllmV2Until23(),
)
