"""API keys: the file, and who is let in."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsparkd.config import ServerConfig
from dsparkd.errors import ConfigError
from dsparkd.http.keys import ApiKeys
from tests.http.conftest import MODEL, error_of, served
from tests.routing.fakes import make_config, metric


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


async def test_only_holders_of_a_key_get_in(checkpoint: Path, tmp_path: Path) -> None:
    """401 with the error object for work and for what is served; probes, metrics and the document stay open."""
    keys = write(tmp_path / "keys", "# clients\nsecret-one\n\nsecret-two\n")
    async with served(make_config(str(checkpoint), api_keys_file=keys)) as server:
        body = {"model": MODEL, "prompt": "a"}
        for header in (None, "", "Bearer", "Bearer wrong", "Basic secret-one", "secret-one", "Bearer secret-one2"):
            headers = {} if header is None else {"Authorization": header}
            response = await server.client.post("/v1/completions", json=body, headers=headers)
            assert error_of(response, 401)["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
        for key in ("secret-one", "secret-two"):
            response = await server.client.post(
                "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            )
            assert response.status_code == 200
        for path in ("/v1/models", "/server_info", "/v1/models/nano"):
            assert (await server.client.get(path)).status_code == 401
        for path in ("/tokenize", "/detokenize", "/v1/chat/completions"):
            assert (await server.client.post(path, json={})).status_code == 401
        for path in ("/health", "/ready", "/metrics", "/openapi.json"):
            assert (await server.client.get(path)).status_code == 200
        assert metric(server.backend.registry, "dsparkd_refusals_total", reason="unauthorized") == 13


def test_without_a_file_everybody_is_welcome() -> None:
    """The default for a server on loopback."""
    assert ApiKeys.load(ServerConfig()).accept("")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o666])
def test_a_file_that_others_can_read_is_a_start_failure(tmp_path: Path, mode: int) -> None:
    """Keys that every user of the machine can read protect nothing."""
    path = write(tmp_path / "keys", "secret\n", mode)
    with pytest.raises(ConfigError, match="chmod 600"):
        ApiKeys.load(ServerConfig(api_keys_file=path))


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_a_file_without_keys_is_a_start_failure(tmp_path: Path, text: str) -> None:
    """An empty file would lock everybody out, or, worse, let everybody in."""
    with pytest.raises(ConfigError, match="holds no key"):
        ApiKeys.load(ServerConfig(api_keys_file=write(tmp_path / "keys", text)))


def test_a_missing_file_is_a_start_failure(tmp_path: Path) -> None:
    """Never "no keys, then no check"."""
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys.load(ServerConfig(api_keys_file=str(tmp_path / "none")))


def test_header_bytes_that_are_no_text_are_refused_quietly() -> None:
    """Headers arrive as latin-1; odd bytes are a wrong key, not an exception."""
    keys = ApiKeys((b"x" * 32,))
    assert not keys.accept("Bearer \xff\udc80")
