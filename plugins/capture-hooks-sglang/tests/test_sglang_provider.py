"""The provider where SGLang is not at hand; real models: tests/engines/test_sglang_anatomy.py."""

import subprocess
import sys

import pytest
from capture_hooks_sglang.anatomy import SGLangAnatomy
from torch import nn

from capture_hooks.errors import BindError
from capture_hooks.plugins import registry


def test_installing_it_adds_its_name():
    assert isinstance(registry().anatomies["sglang"], SGLangAnatomy)


def test_it_imports_nothing_of_sglang_and_claims_no_other_model():
    code = (
        "import sys\n"
        "from torch import nn\n"
        "from capture_hooks_sglang.anatomy import SGLangAnatomy\n"
        "assert SGLangAnatomy().match(nn.Linear(2, 2)) == 0\n"
        "sys.exit(any(name.split('.')[0] == 'sglang' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_another_librarys_model_is_refused_by_name():
    with pytest.raises(BindError, match="Linear holds no LogitsProcessor of SGLang's"):
        SGLangAnatomy().describe(nn.Linear(2, 2))
