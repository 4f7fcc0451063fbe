"""The installed face of ``sgl-kernel-cpu``: what it refuses, what it registers, what its plugin changes.

Each check runs in a process of its own, where the stand-ins may carry the names they stand in for.
"""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sgl_kernel_cpu.hashing import murmur_hash32_cpu

FOLDER = Path(__file__).parent / "sgl-kernel-cpu"


def python(code, *path, **variables):
    """Standard output of ``code``, with the stand-ins and ``path`` importable; fails where it fails."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*map(str, path), str(FOLDER)])} | variables
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REFUSED = """
try:
    import sgl_kernel
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["sgl-kernel", "sglang-kernel"])
def test_refuses_where_a_real_library_is_installed(tmp_path, name):
    info = tmp_path / f"{name.replace('-', '_')}-0.4.10.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.4.10\n")
    message = python(REFUSED, tmp_path)
    assert f"the real kernel library is installed ({name} 0.4.10)" in message
    assert "uninstall capture-hooks-sgl-kernel-cpu" in message


def test_refuses_where_real_operators_are_registered():
    register = """
import torch
library = torch.library.Library("sgl_kernel", "DEF")
library.define("decode_attention_cpu(Tensor x) -> ()")
"""
    assert "already registered by another library" in python(register + REFUSED)


def test_refuses_beside_a_gpu():
    gpu = "import torch\ntorch.cuda.is_available = lambda: True\n"
    assert "a CUDA device is available" in python(gpu + REFUSED)


def test_what_is_missing_imports_and_names_itself_when_called():
    code = """
from sgl_kernel import fused_experts
from sgl_kernel.speculative import tree_speculative_sampling_target_only
import sgl_kernel
for operator in (fused_experts, tree_speculative_sampling_target_only):
    try:
        operator(1, out=2)
    except NotImplementedError as error:
        print(error)
print(hasattr(sgl_kernel, "__wrapped__"), all(hasattr(sgl_kernel, name) for name in sgl_kernel.__all__))
"""
    first, second, rest = python(code).splitlines()
    assert first.startswith("sgl_kernel.fused_experts is not among")
    assert second.startswith("sgl_kernel.speculative.tree_speculative_sampling_target_only is not among")
    assert "capture-hooks-sgl-kernel-cpu" in first
    assert rest == "False True"


def test_operators_are_registered_and_amx_is_not_claimed():
    code = """
import torch, sgl_kernel
ops = torch.ops.sgl_kernel
k, v = torch.randn(6, 1, 4), torch.randn(6, 1, 4)
q, out = torch.randn(1, 2, 4), torch.empty(1, 2, 4)
ops.decode_attention_cpu(
    q, k, v, 1.0, 1.0, out, None, None, torch.tensor([5]), torch.empty(0), torch.arange(6).int().view(1, 6),
    torch.tensor([0]), torch.tensor([6]), 0.5, 0.0, False, 0, None, None,
)
expected = (0.5 * q[0] @ k[:, 0].T).softmax(-1) @ v[:, 0]
print(torch.allclose(out[0], expected, atol=1e-6))
arguments = ops.decode_attention_cpu.default._schema.arguments
print([a.name for a in arguments if a.alias_info and a.alias_info.is_write])
arguments = ops.extend_attention_cpu.default._schema.arguments
print([a.name for a in arguments if a.alias_info and a.alias_info.is_write])
print(hasattr(ops, "convert_weight_packed"), hasattr(ops, "fused_qk_norm_cpu"))
"""
    assert python(code).splitlines() == [
        "True",
        "['k_cache', 'v_cache', 'output']",
        "['o_extend']",
        "False False",
    ]


def test_torchvision_imports_and_refuses_to_work():
    code = """
import torchvision, torchvision.transforms.v2.functional as tvF
from torchvision.io import decode_jpeg
from torchvision.transforms import Compose, InterpolationMode
class Subclass(Compose): pass
print(InterpolationMode.BICUBIC.value, torchvision.__version__)
for use in (lambda: tvF.resize(1), lambda: decode_jpeg(b""), lambda: Subclass([])):
    try:
        use()
    except NotImplementedError as error:
        print(str(error).split(":")[0])
"""
    assert python(code).splitlines() == [
        "bicubic 0.28.0",
        "torchvision.transforms.v2.functional.resize",
        "torchvision.io.decode_jpeg",
        "torchvision.transforms.Compose",
    ]


@pytest.mark.parametrize("value", ["0", ""])
def test_the_plugin_is_inert_unless_asked(value):
    """Without the variable not even SGLang is imported; that it works with it, the engine tests show."""
    code = "import sys, sgl_kernel.plugin as p; p.enable_attention(); print('sglang' in sys.modules)"
    assert python(code, SGL_KERNEL_CPU_ATTENTION=value) == "False"


def murmur3(data: bytes) -> int:
    """MurmurHash3 x86_32 of whole words, with seed 0, after its public definition."""
    state = 0
    for at in range(0, len(data), 4):
        word = int.from_bytes(data[at : at + 4], "little") * 0xCC9E2D51 % 2**32
        word = (word << 15 | word >> 17) % 2**32 * 0x1B873593 % 2**32
        state ^= word
        state = ((state << 13 | state >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    state ^= len(data)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> shift) * factor % 2**32
    return state ^ state >> 16


def test_the_reference_hash_has_published_values():
    assert murmur3(b"") == 0
    assert murmur3(b"test") == 0xBA6BD213


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=3), st.integers(0, 2**32))
def test_the_hash_of_seeded_sampling(seeds, chance):
    source = random.Random(chance)
    positions, columns = [source.randrange(2**31) for _ in seeds], [source.randrange(2**31) for _ in range(4)]
    got = murmur_hash32_cpu(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    assert got.dtype == torch.uint32
    for i, row in enumerate(got.tolist()):
        for j, value in enumerate(row):
            words = [seeds[i] % 2**64, positions[i] | columns[j] << 32]
            assert value == murmur3(b"".join(word.to_bytes(8, "little") for word in words))
