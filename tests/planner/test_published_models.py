"""`find_config` fetches one file from the hub, or reads it from the hub's cache."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError

from hf_moe_ep.cli.main import main
from hf_moe_ep.planner import config as published_models

NAME = "owner/Some-MoE.1"
# The HTTP library of the installed huggingface_hub: httpx or httpx2.
HTTP = sys.modules[HfHubHTTPError.__bases__[0].__module__.partition(".")[0]]


def _raise_no_such_host(request: Any) -> Any:
    """Raise what the HTTP client raises on a machine without a network."""
    raise HTTP.ConnectError("[Errno -2] Name or service not known", request=request)


@pytest.fixture
def install_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """Return `install(reply)`: `reply` answers requests of huggingface_hub from then on.

    `install` returns a list of the requests for the model. The list has no other requests:
    huggingface_hub also fetches a list of agents for its headers, once per process.
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


def test_only_the_config_of_a_hub_id_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    config = published_models.find_config("Qwen/Qwen3-30B-A3B")  # known without a network
    requests: list[str] = []

    def fetch(name: str, **options: object) -> object:
        assert options == {"trust_remote_code": False}
        requests.append(name)
        return config

    monkeypatch.setattr(published_models.AutoConfig, "from_pretrained", fetch)
    assert published_models.find_config(NAME) is config
    assert requests == [NAME]


def test_the_error_without_a_network_names_the_remedies(
    install_hub: Callable[..., list[str]],
    sleep_seconds: list[float],
    capsys: pytest.CaptureFixture[str],
) -> None:
    requests = install_hub(_raise_no_such_host)
    assert main(["memory", NAME, "--gpus", "8"]) == 2
    assert f"HEAD /{NAME}/resolve/main/config.json" in requests
    err = capsys.readouterr().err
    assert f"the config of {NAME!r} was not found on the hub or in its cache" in err
    assert "couldn't connect" in err and "the path of a downloaded config.json" in err, err
    assert "Qwen/Qwen3-30B-A3B" in err and "HF_HUB_OFFLINE=1 searches only the cache" in err, err


def test_without_a_network_the_cached_config_is_read(
    install_hub: Callable[..., list[str]], sleep_seconds: list[float], tmp_path: Path
) -> None:
    requests = install_hub(_raise_no_such_host)
    _cache_config(tmp_path / "cache")
    assert published_models.find_config(NAME).hidden_size == 24
    assert len(requests) == 1 and sleep_seconds == []


def test_hf_hub_offline_asks_no_hub(
    install_hub: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests = install_hub(_raise_no_such_host)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"{NAME}.* was not found .*HF_HUB_OFFLINE=1"):
        published_models.find_config(NAME)
    _cache_config(tmp_path / "cache")
    assert published_models.find_config(NAME).hidden_size == 24
    assert requests == []


def test_the_error_for_a_model_that_is_not_on_the_hub(
    install_hub: Callable[..., list[str]],
) -> None:
    headers = {"X-Error-Code": "RepoNotFound"}
    install_hub(lambda request: HTTP.Response(404, headers=headers, request=request))
    with pytest.raises(ValueError, match=f"{NAME}.* was not found .*not a valid model identifier"):
        published_models.find_config(NAME)
