"""docs/operating.md against routes, refusal codes, keys and files."""

import ast
import re

from dsparkd import errors
from dsparkd.config import TABLE_NAMES
from dsparkd.metrics import FAMILIES
from tools.harness import ROOT

CONFIG_TABLES = {name: section for section, name in TABLE_NAMES.items()}
DOCUMENT = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")


def constants(node: ast.expr | None) -> set[str]:
    """The strings that an expression may be; empty for one that passes another object's code on."""
    match node:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.IfExp(body=body, orelse=orelse):
            return constants(body) | constants(orelse)
        case _:
            return set()


def raised_codes() -> dict[str, set[int]]:
    """Every code of a RequestError, Refused or RowFailure in the package, with its statuses."""
    found: dict[str, set[int]] = {}
    for path in (ROOT / "dsparkd").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assigned = {
            target.id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            keywords = {keyword.arg: keyword.value for keyword in call.keywords}
            match call.func:
                case ast.Name(id="RequestError"):
                    code = keywords.get("code", ast.Constant("invalid_value"))
                    status = keywords.get("status", ast.Constant(400))
                case ast.Name(id="Refused") if len(call.args) > 2:
                    status, code = call.args[1], call.args[2]
                case ast.Name(id="RowFailure"):
                    status, code = call.args[0], call.args[1]
                case _:
                    continue
            if isinstance(code, ast.Name):
                code = assigned[code.id]
            for text in constants(code):
                assert isinstance(status, ast.Constant), ast.unparse(call)
                found.setdefault(text, set()).add(int(str(status.value)))
    return found


def test_refusal_codes_and_their_statuses_are_equal_sets() -> None:
    """Q-12: a client's author finds every code here, with the status that carries it."""
    rows = re.findall(r"^\| `([a-z0-9_]+)` \| (\d{3}) \|", DOCUMENT, re.MULTILINE)

    assert {code: {int(status)} for code, status in rows} == raised_codes()


def test_routes_are_equal_sets() -> None:
    """Q-12: documented routes, methods and keys are those of the application's table."""
    source = (ROOT / "dsparkd" / "http" / "app.py").read_text(encoding="utf-8")
    tree = ast.parse(source)
    declared = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if isinstance(call.func, ast.Name) and call.func.id == "endpoint":
            route = call.args[0].value if isinstance(call.args[0], ast.Constant) else "/v1/models"
            method = call.args[1].value if isinstance(call.args[1], ast.Constant) else ""
            declared[route] = (method, "no" if "open_to_all=True" in ast.unparse(call) else "yes")

    rows = re.findall(r"^\| `(/[^`]*)` \| (\w+) \| (yes|no) \|", DOCUMENT, re.MULTILINE)

    assert {route: (method, key) for route, method, key in rows} == declared


def test_exit_codes_are_those_of_the_code() -> None:
    """Q-12: what systemd acts on."""
    rows = {int(code) for code in re.findall(r"^\| (\d+) \| ", DOCUMENT, re.MULTILINE)}

    assert rows == {errors.EXIT_OK, errors.EXIT_FATAL, errors.EXIT_CONFIG, 2}
    unit = (ROOT / "systemd" / "dsparkd.service").read_text(encoding="utf-8")
    assert f"RestartPreventExitStatus={errors.EXIT_CONFIG}" in unit


def test_keys_and_metrics_that_the_documents_mention_exist() -> None:
    """Q-12: no document sends an operator to something that is gone."""
    families = {family.name for family in FAMILIES}
    keys = {f"{table}.{key}" for table, section in CONFIG_TABLES.items() for key in section.__struct_fields__}
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        mentioned = set(re.findall(r"`(dsparkd_\w+)", text))
        assert mentioned <= families, path.name
        tables = "|".join(CONFIG_TABLES)
        assert set(re.findall(rf"`((?:{tables})\.[a-z_]+)(?: = [^`]*)?`", text)) <= keys, path.name


def test_files_and_links_that_the_documents_name_exist() -> None:
    """A link that leads nowhere, or a command on a file that moved."""
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        text = path.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (path.parent / link).exists(), f"{path.name}: {link}"
        for file in re.findall(r"`((?:conf|docs|systemd|tools|tests|dsparkd)/[\w./-]+)`", text):
            assert (ROOT / file).exists(), f"{path.name}: {file}"
