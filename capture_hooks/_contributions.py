"""Values by name, and what is said when a name is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar, final

from ._one_plugin import BrokenPlugin
from .errors import PluginError

_T = TypeVar("_T")


class MissingPluginError(PluginError, KeyError):
    """Nothing installed has the name that was asked for."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the message quoted


@final
class Contributions(Mapping[str, _T], Generic[_T]):
    """Read-only values by name, sorted; a missing name raises a `PluginError` that lists them."""

    __slots__ = ("_broken", "_kind", "_values")

    def __init__(self, kind: str, values: Mapping[str, _T], broken: Sequence[BrokenPlugin]) -> None:
        self._kind = kind
        self._values = dict(sorted(values.items()))
        self._broken = tuple(broken)

    def __getitem__(self, name: str) -> _T:
        if name in self._values:
            return self._values[name]
        near = difflib.get_close_matches(str(name), self._values, n=1)
        lines = [
            f"nothing named {name!r} among the installed {self._kind}"
            + (f" ({', '.join(self._values)})" if self._values else ": there are none")
            + (f"; did you mean {near[0]!r}?" if near else "")
        ]
        if self._broken:
            lines.append("broken, and so left out:")
            lines += [f"  {plugin}" for plugin in self._broken]
        raise MissingPluginError("\n".join(lines))

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"<{self._kind}: {', '.join(self._values) or 'none'}>"
