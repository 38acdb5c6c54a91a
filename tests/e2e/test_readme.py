"""The README's first requests, word by word, against the server that `make serve` starts."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tools.harness import ROOT, Server, ensure_checkpoint

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    ensure_checkpoint()
    with Server() as running:
        yield running.wait_ready()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


def test_the_first_curl_gets_an_answer(server: Server) -> None:
    """The first thing that a newcomer does."""
    (block,) = [block for block in blocks("sh") if "/v1/chat/completions" in block]
    command = shlex.split(block)
    assert command[0] == "curl"

    done = subprocess.run(
        [word.replace("http://127.0.0.1:8000", server.base_url) for word in command],
        capture_output=True,
        text=True,
        check=True,
    )

    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] > 0


def test_the_client_example_prints_text(server: Server) -> None:
    """The openai client, streamed, as it stands in the README."""
    (code,) = blocks("python")

    done = subprocess.run(
        [sys.executable, "-c", code.replace("http://127.0.0.1:8000", server.base_url)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )

    assert done.stdout.strip()


def test_the_health_urls_answer(server: Server) -> None:
    """Each URL of the README."""
    paths = re.findall(r"^curl -s http://127\.0\.0\.1:8000(/\w+)$", TEXT, re.MULTILINE)

    assert set(paths) == {"/ready", "/health_scheduler", "/server_info", "/metrics"}
    assert {server.status(path) for path in paths} == {200}


def test_make_targets_of_the_readme_exist() -> None:
    """Two doors for a newcomer, and what CI runs."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"make (serve|test|check|venv)\b", TEXT):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make check" in ci
    assert "make test" in ci
