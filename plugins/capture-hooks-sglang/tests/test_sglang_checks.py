"""What is refused before a server is started, and the message of each refusal."""

import json
import socket
from importlib import metadata
from pathlib import Path

import pytest
from capture_hooks_sglang.driver import SGLANG, SGLangDriver, own_arithmetic
from capture_hooks_sglang.serving.request import capture_request

from capture_hooks.engines.checks import check_port, check_target
from capture_hooks.errors import EngineError, HeadError, ModelError, SpecError
from capture_hooks.heads import inspect_head

HEAD = Path(__file__).parents[3] / "examples" / "smollm2" / "head"
DRIVER = SGLangDriver()


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


def refusal(head, environment=None, model=Path("model")):
    with pytest.raises((HeadError, EngineError, SpecError)) as caught:
        DRIVER.check_head(head, model, environment or {})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_shipped_head_is_asked_for_as_it_is(head):
    described, asked = DRIVER.check_head(head, Path("model"), {}), capture_request({}, str(head))
    assert described.directory == asked.head.directory
    assert [str(point) for point in asked.spec.inputs] == ["post.2", "post.15", "post.27"]
    assert asked.verify == "strict"


def test_no_directory_no_head_no_section(head, tmp_path):
    assert "is not a directory" in refusal(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "holds no config.json" in refusal(tmp_path / "empty")
    change(head, lambda config: config.pop("capture"))
    said = refusal(head, model=Path("a model"))
    assert "nothing to prove" in said
    plain = f"--model-path 'a model' --speculative-algorithm EAGLE3 --speculative-draft-model-path {head}"
    assert said.endswith(plain)


def test_a_section_of_a_later_format(head):
    change(head, lambda config: config["capture"].update(format=2))
    assert "format 2, and this version reads 1; update capture-hooks" in refusal(head)


def test_settings_of_the_environment(head):
    assert "CAPTURE_HOOKS_VERIFY is 'no'" in refusal(head, {"CAPTURE_HOOKS_VERIFY": "no"})
    assert "asks for 2 points" in refusal(head, {"CAPTURE_HOOKS_SPEC": "post.1, post.2"})
    assert "post.30" in refusal(head, {"CAPTURE_HOOKS_SPEC": "post.1, post.2, post.30"})
    assert "nonsense" in refusal(head, {"CAPTURE_HOOKS_SPEC": "nonsense"})


def exclude(head, *reasons):
    """Rewrite the statement for SGLang, with the ids that a saved head then carries."""

    def edit(config):
        for statement in config["capture"]["engines"]:
            if statement["engine"] == "sglang":
                statement.update(excluded=list(reasons), ids=None)
        text = f"sglang 0.5.23 cannot serve this head: {'; '.join(reasons)}"
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = {text: 0}

    change(head, edit)


def test_a_head_that_sglang_would_compute_otherwise_is_refused(head):
    why = "it ignores norm_before_residual and adds the un-normed state"
    exclude(head, why)
    assert why in refusal(head)


def test_points_that_only_ids_cannot_say_are_served(head):
    """Boundary n has no id on SGLang's llama; the plugin captures it."""
    from capture_hooks.conventions import engine_ids
    from capture_hooks.heads.engines import SGLANG_KEY, between_layers
    from capture_hooks.spec import Point

    points = [Point.parse(text) for text in ("post.2", "post.15", "post.29")]
    why = engine_ids("sglang", points, 30, "llama", SGLANG_KEY).excluded
    assert why
    section = inspect_head(HEAD).section
    spec = {"format": 1, "inputs": [str(point) for point in points], "target": "final_norm"}
    statements = [
        s.model_copy(update={"excluded": [why, *more]}) if s.engine == "sglang" else s
        for more in ([between_layers("sglang", "llama")],)
        for s in section.engines
    ]
    only_ids = section.model_copy(update={"spec": spec, "engines": statements})
    assert own_arithmetic(only_ids) == []
    worse = statements[1].model_copy(update={"excluded": [why, "its fc is strange"]})
    both = only_ids.model_copy(update={"engines": [statements[0], worse, *statements[2:]]})
    assert own_arithmetic(both) == ["its fc is strange"]


def target(tmp_path, **changes):
    """A model directory of the shape that the shipped head was trained on."""
    config = {"model_type": "llama", "num_hidden_layers": 30, "hidden_size": 576, "vocab_size": 49152}
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 32}, "32 layers instead of 30"),
        ({"hidden_size": 960}, "960 values in a state instead of 576"),
        ({"vocab_size": 100}, "100 tokens instead of 49152"),
        ({"model_type": "qwen3"}, "of the family 'qwen3' instead of 'llama'"),
        (
            {"model_type": "gpt2", "n_layer": 12, "num_hidden_layers": None},
            "'gpt2' instead of 'llama', 12 layers",
        ),
    ],
)
def test_another_target_is_refused(tmp_path, changes, said):
    description = inspect_head(HEAD)
    with pytest.raises(EngineError) as caught:
        check_target(description, target(tmp_path, **changes))
    assert said in str(caught.value)
    assert str(HEAD) in str(caught.value)


def test_its_own_target_is_not_refused_nor_one_inside_a_multimodal_config(tmp_path):
    description = inspect_head(HEAD)
    check_target(description, target(tmp_path))
    text = json.loads((tmp_path / "config.json").read_text())
    vision = {"model_type": "siglip", "num_hidden_layers": 3, "hidden_size": 8, "vocab_size": 5}
    whole = {"model_type": "smolvlm", "vision_config": vision, "text_config": text, "vocab_size": 7}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    check_target(description, tmp_path)
    whole["text_config"] = {**text, "num_hidden_layers": 31}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(EngineError, match="31 layers"):
        check_target(description, tmp_path)


def test_a_target_that_is_none(tmp_path):
    description = inspect_head(HEAD)
    with pytest.raises(ModelError, match="is not a directory"):
        check_target(description, tmp_path / "nowhere")
    with pytest.raises(ModelError, match="no model that can be served"):
        check_target(description, tmp_path)
    check_target(description, Path("owner/name"))  # on the hub: the server compares


def check(command):
    check_port(command.bind, command.port)


def test_a_port_in_use():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            EngineError, match=rf"port {port} on 127.0.0.1 cannot be had \(Address already in use\)"
        ):
            check(DRIVER.compose(HEAD, Path("m"), ["--port", str(port)]))
    check(DRIVER.compose(HEAD, Path("m"), ["--port", str(port)]))


@pytest.mark.parametrize("flags", [["--port", "70000"], ["--host", "192.0.2.1"]])
def test_an_address_that_cannot_be_had(flags):
    with pytest.raises(EngineError, match="cannot be had"):
        check(DRIVER.compose(HEAD, Path("m"), flags))


def test_a_plugin_that_sglang_is_told_to_leave_out(monkeypatch):
    point = metadata.EntryPoint(
        "capture_hooks", "capture_hooks_sglang.serving.host:activate", "sglang.srt.plugins"
    )
    monkeypatch.setattr(
        metadata, "entry_points", lambda group: metadata.EntryPoints([point]).select(group=group)
    )
    DRIVER.check_plugin_loads({})
    DRIVER.check_plugin_loads({"SGLANG_PLUGINS": " other , capture_hooks"})
    with pytest.raises(EngineError, match="leaves capture_hooks out"):
        DRIVER.check_plugin_loads({"SGLANG_PLUGINS": "sgl_kernel_cpu"})
    monkeypatch.setattr(metadata, "entry_points", lambda group: metadata.EntryPoints())
    with pytest.raises(EngineError, match="install capture-hooks-sglang again"):
        DRIVER.check_plugin_loads({})


@pytest.mark.parametrize(
    ("version", "inside"),
    [
        ("0.5.22", True),
        ("0.5.22.post1", True),
        ("0.5.23", True),
        ("0.5.23rc1", False),
        ("0.5.24", False),
        ("0.5.21", False),
        ("0.6.0", False),
        ("of unknown version", False),
    ],
)
def test_versions(version, inside):
    assert SGLANG.is_tested(version) is inside


@pytest.fixture
def package(tmp_path):
    """Source that defines every feature and nothing else."""
    files = {}
    for feature in SGLANG.features:
        outer, _, inner = feature.name.rpartition(".")
        classes = files.setdefault(feature.file, {})
        arguments = ", ".join(feature.arguments or ())
        line = f"def {inner}({arguments}): ..." if feature.arguments is not None else f"{inner} = 1"
        classes.setdefault(outer, []).append(line)
    for file, classes in files.items():
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for outer, body in classes.items():
            lines += [f"class {outer}:", *(f"    {line}" for line in body)] if outer else body
        path.write_text("\n".join(lines))
    return tmp_path


def test_an_untested_version_that_has_everything_is_a_warning(package):
    assert SGLANG.judge("0.5.23", package / "nowhere") is None  # tested: not even looked at
    warning = SGLANG.judge("0.9.9", package)
    assert warning.startswith("SGLang 0.9.9 is outside the versions that were tested (0.5.22 to 0.5.23)")


@pytest.mark.parametrize("feature", SGLANG.features, ids=lambda feature: feature.name)
def test_an_untested_version_that_lacks_anything_is_refused(package, feature):
    path = package / feature.file
    whole, inner = path.read_text(), feature.name.rpartition(".")[2]
    changed = {
        f"defines no {feature.name}": whole.replace(f"{inner}(", "renamed(").replace(
            f"{inner} =", "renamed ="
        )
    }
    if feature.arguments is not None:
        call = f"{inner}({', '.join(feature.arguments)})"
        changed["needs novelty"] = whole.replace(
            call, f"{inner}({', '.join((*feature.arguments, 'novelty'))})"
        )
    if feature.arguments:
        kept = ", ".join((*feature.arguments[:-1], "other=None"))
        changed[f"takes no {feature.arguments[-1]}"] = whole.replace(call, f"{inner}({kept})")
    for said, text in changed.items():
        path.write_text(text)
        with pytest.raises(EngineError, match=said):
            SGLANG.judge("0.9.9", package)
    path.unlink()
    with pytest.raises(EngineError, match=f"{feature.file} is not there"):
        SGLANG.judge("0.9.9", package)


def test_a_value_of_an_instance_is_found_where_it_begins(package):
    path = package / "srt/managers/schedule_batch.py"
    whole = path.read_text()
    path.write_text(
        whole.replace(
            "    extend_end = 1\n", "    def __init__(self):\n        self.extend_end: int | None = None\n"
        )
    )
    assert "self.extend_end" in path.read_text()
    assert SGLANG.judge("0.9.9", package) is not None
    path.write_text(path.read_text().replace("self.extend_end:", "self.extend_range:"))
    with pytest.raises(EngineError, match=r"defines no Req\.extend_end"):
        SGLANG.judge("0.9.9", package)


def test_a_parameter_with_a_default_is_nobodys_business(package):
    path = package / "srt/runtime_context.py"
    path.write_text(path.read_text().replace("get_spec()", "get_spec(more=1, *, most=2)"))
    assert SGLANG.judge("0.9.9", package) is not None
