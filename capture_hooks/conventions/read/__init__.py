"""Conventions of the second rank: read in the libraries' sources, dated, and not run by the tests.

One module for each library.  A version written as a date is the day of the commit that was read, for
repositories without releases.
"""

from __future__ import annotations

from ..contract import Convention, Reader
from . import angelslim, eagle, llama_cpp, llama_cpp_reader, nemo, tensorrt_llm, torchspec, zlab

#: In no particular order.
CONVENTIONS: tuple[Convention, ...] = (
    *angelslim.CONVENTIONS,
    *eagle.CONVENTIONS,
    *llama_cpp.CONVENTIONS,
    *nemo.CONVENTIONS,
    *tensorrt_llm.CONVENTIONS,
    *torchspec.CONVENTIONS,
    *zlab.CONVENTIONS,
)
READERS: tuple[Reader, ...] = (
    *eagle.READERS,
    llama_cpp_reader.LlamaCppReader(),
    *tensorrt_llm.READERS,
    *zlab.READERS,
)
