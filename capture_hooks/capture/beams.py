"""Beam search moves sequences between rows of the cache; a capture would mix them up, so it is refused.

While a session follows a cache, that cache object (never its class) carries a ``reorder_cache`` that refuses.
"""

from __future__ import annotations

import types
import weakref
from typing import Any, NoReturn

from ..errors import CaptureError


class Refusal:
    """Stands in for ``cache.reorder_cache`` on one cache, for as long as any session follows it."""

    def __init__(self, cache: Any) -> None:
        self._cache = weakref.ref(cache)
        self._followers: set[int] = set()

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise CaptureError(
            "beam search reorders the KV cache between forwards, so captured rows would belong to other "
            "sequences than they were computed for; capture with num_beams=1"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied cache is followed by nobody: it gets its own class's method back."""
        original = self._cache()
        copied = memo[id(original)]
        return types.MethodType(type(copied).reorder_cache, copied)


def refuse_reordering(cache: Any, follower: object) -> None:
    """Make ``cache.reorder_cache`` raise until `allow_reordering`."""
    if not hasattr(cache, "reorder_cache"):
        return
    refusal = vars(cache).get("reorder_cache")
    if not isinstance(refusal, Refusal):
        refusal = vars(cache)["reorder_cache"] = Refusal(cache)
    refusal._followers.add(id(follower))


def allow_reordering(cache: Any, follower: object) -> None:
    """Undo `refuse_reordering`; the method comes back when nobody follows the cache any more."""
    refusal = vars(cache).get("reorder_cache")
    if isinstance(refusal, Refusal):
        refusal._followers.discard(id(follower))
        if not refusal._followers:
            del vars(cache)["reorder_cache"]
