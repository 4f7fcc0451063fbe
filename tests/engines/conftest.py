"""Makes the modules of ``sgl-kernel-cpu`` importable as ``sgl_kernel_cpu``, not as what they stand in for.

The package's own ``__init__`` registers operators and may refuse to load: that is tested in other processes.
Test files here share `both_engines`, `cpu_settings`, `vllm_setting` and `stand_in`.
"""

import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parent))

package = ModuleType("sgl_kernel_cpu")
package.__path__ = [str(Path(__file__).parent / "sgl-kernel-cpu" / "sgl_kernel")]
sys.modules.setdefault("sgl_kernel_cpu", package)
