"""`find_config` fetches one file from the hub, and fails at once if the hub does not answer."""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from hf_moe_ep.cli.main import main
from hf_moe_ep.planner import config as published_models
from hf_moe_ep.upstream import hub

NAME = "owner/Some-MoE.1"
# The HTTP library of the installed huggingface_hub: httpx or httpx2.
HTTP = sys.modules[HfHubHTTPError.__bases__[0].__module__.partition(".")[0]]


def _no_such_host(request: Any) -> Any:
    """Raise what the HTTP client raises on a machine without a network."""
    raise HTTP.ConnectError("[Errno -2] Name or service not known", request=request)


@pytest.fixture
def install_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """Return `install(reply)`: `reply` answers requests of huggingface_hub from then on.

    `install` returns a list of the requests for the model. Others are left out: once per process,
    huggingface_hub also fetches a list of agents for its headers.
    """

    def install(reply: Callable[[Any], Any]) -> list[str]:
        requests: list[str] = []

        def send(request: Any) -> Any:
            if NAME in request.url.path:
                requests.append(f"{request.method} {request.url.path}")
            return reply(request)

        client = HTTP.Client(transport=HTTP.MockTransport(send))
        monkeypatch.setattr("huggingface_hub.utils._http._GLOBAL_CLIENT", client)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        return requests

    return install


@pytest.fixture
def sleep_seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace `time.sleep` by a function that only records the seconds, and return the record."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


def _cache_config(cache: Path) -> None:
    commit = "0" * 40
    folder = cache / f"models--{NAME.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit).mkdir(parents=True)
    fields = {"model_type": "qwen3_moe", "hidden_size": 24}
    (folder / "snapshots" / commit / "config.json").write_text(json.dumps(fields))


def test_a_hub_id_fetches_only_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    config = published_models.find_config("Qwen/Qwen3-30B-A3B")  # known without a network
    requests: list[str] = []

    def fetch(name: str, **options: object) -> object:
        assert not options["local_files_only"]
        requests.append(name)
        return config

    monkeypatch.setattr(hub, "get_hf_file_metadata", lambda url, **_: requests.append(url))
    monkeypatch.setattr(published_models.AutoConfig, "from_pretrained", fetch)
    assert published_models.find_config(NAME) is config
    assert requests == [f"{constants.ENDPOINT}/{NAME}/resolve/main/config.json", NAME]


def test_without_a_network_the_hub_is_asked_once(
    install_hub: Callable[..., list[str]],
    sleep_seconds: list[float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    requests = install_hub(_no_such_host)
    assert main(["memory", NAME, "--gpus", "8"]) == 2
    assert requests == [f"HEAD /{NAME}/resolve/main/config.json"]
    assert sleep_seconds == []
    err = capsys.readouterr().err
    assert f"the config of {NAME!r} was not found on the hub or in its cache" in err
    assert "Name or service not known" in err and "the path of a downloaded config.json" in err, err


def test_without_a_network_the_cached_config_is_read(
    install_hub: Callable[..., list[str]], sleep_seconds: list[float], tmp_path: Path
) -> None:
    requests = install_hub(_no_such_host)
    _cache_config(tmp_path / "cache")
    assert published_models.find_config(NAME).hidden_size == 24
    assert len(requests) == 1 and sleep_seconds == []


def test_a_model_that_is_not_on_the_hub(install_hub: Callable[..., list[str]]) -> None:
    headers = {"X-Error-Code": "RepoNotFound"}
    install_hub(lambda request: HTTP.Response(404, headers=headers, request=request))
    with pytest.raises(ValueError, match=f"{NAME}.* was not found .*Repository Not Found for url"):
        published_models.find_config(NAME)


def test_the_error_for_a_hub_that_does_not_answer(
    install_hub: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = threading.Event()

    def drop(request: Any) -> Any:
        assert dropped.wait(100)  # behind a firewall, a request is dropped without an answer
        return _no_such_host(request)

    requests = install_hub(drop)
    monkeypatch.setattr(hub, "_ANSWER_SECONDS", 0.25)
    try:
        with pytest.raises(ValueError, match=r"the hub did not answer within 0\.25 seconds"):
            published_models.find_config(NAME)
        assert len(requests) == 1
    finally:
        dropped.set()
