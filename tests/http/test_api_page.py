"""docs/api.md against the code: endpoints, fields and codes, in both directions."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from dsparkd.http import openai
from tests.http.conftest import Served
from tests.routing.fakes import make_config

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def rows(title: str) -> list[list[str]]:
    """Cells of the table under a heading."""
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def names(title: str) -> list[str]:
    return [row[0].strip("` ") for row in rows(title)]


def fields(kind: type[msgspec.Struct]) -> list[str]:
    return [field.encode_name for field in msgspec.structs.fields(kind)]


async def test_endpoints_are_those_of_the_application(server: Served) -> None:
    """Path, method and whether a key is needed."""
    app = server.client._transport.app  # type: ignore[attr-defined]
    actual = {(route.path, route.app._methods[0], "no" if route.app._keys is None else "yes") for route in app.routes}
    assert {(row[0].strip("`"), row[1], row[2]) for row in rows("Endpoints")} == actual


@pytest.mark.parametrize(
    ("titles", "kind"),
    [
        (["Fields of both generating endpoints", "Fields of /v1/chat/completions"], openai.ChatRequest),
        (["Fields of both generating endpoints", "Fields of /v1/completions"], openai.CompletionRequest),
        (["Fields of /tokenize"], openai.TokenizeRequest),
        (["Fields of /detokenize"], openai.DetokenizeRequest),
    ],
)
def test_fields_are_those_of_the_bodies(titles: list[str], kind: type[msgspec.Struct]) -> None:
    """Every accepted field is on the page, and nothing else is."""
    listed = [name for title in titles for name in names(title)]
    assert sorted(listed) == sorted(fields(kind))


def test_codes_are_those_of_the_code() -> None:
    """Every code that a client can get, with its status where the code names one."""
    found: dict[str, set[str]] = {"invalid_value": {"400"}}
    for path in (*ROOT.glob("dsparkd/http/*.py"), *ROOT.glob("dsparkd/routing/*.py")):
        for call in re.findall(r"RequestError\((?:[^()]|\([^()]*\))*\)", path.read_text(encoding="utf-8")):
            code = re.search(r'code="([a-z0-9_]+)"', call)
            status = re.search(r"status=(\d+)", call)
            if code:
                found.setdefault(code[1], set()).add(status[1] if status else "400")
    for path in ROOT.glob("dsparkd/scheduler/*.py"):
        for status_code, name in re.findall(r'Refused\([^,]+, (\d+), "([a-z0-9_]+)"', path.read_text(encoding="utf-8")):
            found.setdefault(name, set()).add(status_code)
    found["invalid_dp_rank"] = {"400"}
    listed = {row[0].strip("`"): {row[1]} for row in rows("Refusals")}
    assert listed == found


def test_limits_on_the_page_are_the_defaults_of_the_code() -> None:
    """The keys that the page names exist."""
    keys = set(re.findall(r"`(limits|engine|server|text|metrics)\.([a-z_]+)`", PAGE))
    config = make_config()
    assert keys
    for table, key in keys:
        assert hasattr(getattr(config, table), key), f"{table}.{key}"
