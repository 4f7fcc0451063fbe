"""What is refused before SGLang is started in the background; no SGLang is needed to see it."""

from pathlib import Path

import pytest
from capture_hooks_sglang.running.decode import decode
from capture_hooks_sglang.running.server import running

from capture_hooks.errors import EngineError


@pytest.mark.parametrize("words", [["--config", "f.yaml"], ["--config=f.yaml"], ["--conf", "f.yaml"]])
def test_a_config_file_cannot_be_given_to_both_servers(words):
    with pytest.raises(EngineError, match="--config FILE may hold"), decode(Path("model"), None, words):
        pass


@pytest.mark.parametrize(
    "words",
    [["--api-key", "x"], ["--ssl-certfile=c.pem"], ["--nnodes", "2"], ["--port", "1"], ["--host", "h"]],
)
def test_a_server_for_others_is_refused(words):
    flag = words[0].partition("=")[0]
    with pytest.raises(EngineError, match=f"{flag}: this server is asked"), running(words, {}):
        pass
