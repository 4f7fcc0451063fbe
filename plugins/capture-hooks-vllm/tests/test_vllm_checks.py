"""What is refused before vLLM is started, and what installing the plugin does not do."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from capture_hooks_vllm.driver import VLLM, VllmDriver

from capture_hooks.errors import EngineError, HeadError
from capture_hooks.heads import inspect_head
from capture_hooks.heads.engines import vllm_ids
from capture_hooks.plugins import registry

HEAD = Path(__file__).parents[3] / "examples" / "smollm2" / "head"
DRIVER = VllmDriver()


@pytest.fixture
def head(tmp_path):
    """The shipped head in a directory whose config may be written anew."""
    place = tmp_path / "head"
    place.mkdir()
    for name in ("model.safetensors", "capture"):
        (place / name).symlink_to(HEAD / name)
    (place / "config.json").write_text((HEAD / "config.json").read_text())
    return place


def change(head, edit):
    config = json.loads((head / "config.json").read_text())
    edit(config)
    (head / "config.json").write_text(json.dumps(config))


def refusal(head, environment=None):
    with pytest.raises((HeadError, EngineError)) as caught:
        DRIVER.check_head(head, Path("model"), environment or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_shipped_head_is_right_for_vllm(head):
    described = DRIVER.check_head(head, Path("model"), {})
    assert [str(point) for point in described.file_inputs] == ["post.2", "post.15", "post.27"]


def test_ids_one_lower_are_named_with_what_they_mean(head):
    change(head, lambda config: config.update(eagle_aux_hidden_state_layer_ids=[2, 15, 27]))
    said = refusal(head)
    assert "eagle_aux_hidden_state_layer_ids is [2, 15, 27] (pre.2, pre.15, pre.27)" in said
    assert "the capture section says [3, 16, 28] (post.2, post.15, post.27)" in said


def test_no_section_and_a_section_that_excludes_vllm(head):
    def exclude(config):
        for number, statement in enumerate(config["capture"]["engines"]):
            if statement["engine"] == "vllm":
                statement.update(excluded=["its fc has a bias"], ids=None)
                excluded = inspect_head(HEAD).engines[number].model_copy(update=statement)
                config["eagle_aux_hidden_state_layer_ids"] = vllm_ids(excluded)

    change(head, exclude)
    assert refusal(head).endswith("its fc has a bias")
    change(head, lambda config: config["capture"]["engines"].pop(2))
    assert "does not speak for vLLM" in refusal(head)
    change(head, lambda config: config.pop("capture"))
    assert "nothing to prove" in refusal(head)
    assert "--speculative-config" in refusal(head)


def test_settings_of_the_environment(head):
    assert "CAPTURE_HOOKS_VERIFY is 'no'" in refusal(head, {"CAPTURE_HOOKS_VERIFY": "no"})


def test_a_plugin_that_vllm_is_told_to_leave_out(monkeypatch):
    DRIVER.check_plugin_loads({})
    DRIVER.check_plugin_loads({"VLLM_PLUGINS": "other,capture_hooks"})
    for value in ("", "other", "other, capture_hooks"):  # vLLM strips no blanks
        with pytest.raises(EngineError, match="leaves capture_hooks out"):
            DRIVER.check_plugin_loads({"VLLM_PLUGINS": value})
    monkeypatch.setattr(metadata, "entry_points", lambda group: metadata.EntryPoints())
    with pytest.raises(EngineError, match="install capture-hooks-vllm again"):
        DRIVER.check_plugin_loads({})


def test_an_untested_version_without_what_is_needed(tmp_path):
    assert VLLM.judge("0.32.0", tmp_path) is None
    with pytest.raises(EngineError, match=r"vLLM 0\.99\.0 is outside the versions that were tested .*lacks"):
        VLLM.judge("0.99.0", tmp_path)


def test_installing_it_adds_its_name():
    assert isinstance(registry().engines["vllm"], VllmDriver)


def test_activated_unasked_it_imports_nothing():
    code = (
        "import sys\n"
        "from capture_hooks_vllm.activate import activate\n"
        "before = set(sys.modules)\n"
        "activate()\n"
        "sys.exit(set(sys.modules) != before or 'torch' in sys.modules or 'vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], env={}).returncode == 0


def test_the_first_error_is_the_cause_not_a_warning_nor_what_follows():
    log = (
        "(APIServer pid=1) WARNING 11-30 08:04:23 [base.py:380] ValueError: Tokenizer not available\n"
        "(Worker pid=2) ERROR 11-30 08:04:26 [executor.py:1063] Traceback (most recent call last):\n"
        '(Worker pid=2) ERROR 11-30 08:04:26 [executor.py:1063]   File "a.py", line 1, in f\n'
        "(Worker pid=2) ERROR 11-30 08:04:26 [executor.py:1063] capture.errors.EngineError: too wide\n"
        "(EngineCore pid=3) ERROR 11-30 08:04:26 [core.py:1512] RuntimeError: Worker failed\n"
    )
    assert DRIVER.cause(log) == "EngineError: too wide"
    own = (
        "  return f()\npydantic_core.ValidationError: 1 validation error for Config\n  Value error, no such\n"
    )
    assert DRIVER.cause(own) == "ValidationError: 1 validation error for Config Value error, no such"
    assert DRIVER.cause("INFO: all is well\n") is None
