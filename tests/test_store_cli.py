"""dsparkd grammar-store: looks, checks, mends and fills, also beside a server that uses the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsparkd import store_cli
from dsparkd.config import Config, EngineConfig, GrammarConfig, GrammarStoreConfig, KVConfig
from dsparkd.errors import EXIT_CONFIG, EXIT_OK, ConfigError
from dsparkd.grammar.key import digest
from dsparkd.grammar.store import Entry, EntryKind, GrammarStore, KeyLock, StoreFull, prepare, scope_name
from dsparkd.grammar.vocabulary import make_vocabularies
from dsparkd.messages import Grammar
from dsparkd.model.config import ModelConfig, load_model_config
from dsparkd.text.tokenizer import Tokenizer
from tools.harness import ROOT, ensure_checkpoint


class Rig:
    """A configuration over a store of its own, and what the command says."""

    def __init__(self, directory: Path, **keys: int) -> None:
        checkpoint = ensure_checkpoint()
        store = GrammarStoreConfig(directory=str(directory / "store"), **keys)  # type: ignore[arg-type]
        self.config = Config(
            engine=EngineConfig(checkpoint=str(checkpoint), device="cpu"),
            kv=KVConfig(device_bytes=1 << 28),
            grammar=GrammarConfig(workers=1, probe_wall_s=100.0, store=store),
        )
        self.model: ModelConfig = load_model_config(checkpoint)
        tokenizer = Tokenizer.load(checkpoint)
        self.scope = make_vocabularies(tokenizer, self.model.vocab_size, (self.model.eos_token_id,)).scope()

    def open(self) -> GrammarStore:
        config = self.config.grammar.store
        return GrammarStore(prepare(config, self.scope), config)

    def put(self, text: str, size: int = 10) -> Path:
        """Publish an entry; returns its file."""
        store = self.open()
        grammar = Grammar(kind="regex", text=text)
        lock = store.try_lock(digest(grammar, self.scope))
        assert lock is not None
        store.publish(lock, Entry(EntryKind.SERIALIZED, grammar, bytes(size), 10**6, 1, size))
        lock.release()
        return store.directory / f"{lock.digest}.entry"

    def run(self, verb: store_cli.Verb, bodies: Path | None = None) -> int:
        return store_cli.run(self.config, self.model, verb, bodies)


def test_list_shows_every_entry_and_lets_no_text_move_the_cursor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Least recently used first; a client's text is escaped."""
    rig = Rig(tmp_path)
    first = rig.put("a\x1b[2J\nb")
    os.utime(first, (1e9, 1e9))
    rig.put("c")
    assert rig.run("list") == EXIT_OK
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith(first.stem)
    assert r'regex "a\u001b[2J\nb"' in lines[0]
    assert "serialized" in lines[1]
    assert "2 entries" in lines[2]


def test_an_empty_store_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And looking creates nothing."""
    rig = Rig(tmp_path)
    for verb in ("list", "verify", "repair", "prune"):
        assert rig.run(verb) == EXIT_OK  # type: ignore[arg-type]
    assert not (tmp_path / "store").exists()
    assert "does not exist" in capsys.readouterr().out


def test_verify_finds_damage_and_repair_removes_it_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """G-33: damage stays on disk until then; one that a server reads at this moment stays, too."""
    rig = Rig(tmp_path)
    good, bad, busy = rig.put("good"), rig.put("bad"), rig.put("busy")
    bad.write_bytes(bad.read_bytes()[:-1])
    busy.write_bytes(b"")
    dead = good.parent / f".{good.stem}.999999999.0.tmp"
    alive = good.parent / f".{good.stem}.{os.getpid()}.0.tmp"
    for path in (dead, alive):
        path.touch(mode=0o600)
    lock = rig.open().try_lock(busy.stem)
    assert lock is not None
    dead.touch()  # open() swept it
    assert rig.run("verify") == store_cli.EXIT_DAMAGED
    said = capsys.readouterr().out
    assert bad.stem in said
    assert "3 entries, 2 damaged" in said
    assert bad.exists()

    assert rig.run("repair") == store_cli.EXIT_DAMAGED
    assert (good.exists(), bad.exists(), busy.exists()) == (True, False, True)
    assert (dead.exists(), alive.exists()) == (False, True)
    lock.release()
    assert rig.run("repair") == EXIT_OK
    assert not busy.exists()
    assert rig.run("verify") == EXIT_OK
    assert rig.open().totals() == (good.stat().st_size, 1)


def test_prune_goes_below_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """G-42: after the operator made the limit smaller."""
    rig = Rig(tmp_path)
    for number in range(8):
        rig.put(str(number), 200_000)
    small = Rig(tmp_path, bytes=1 << 20, max_entry_bytes=1 << 20)
    assert small.run("prune") == EXIT_OK
    assert small.open().totals()[0] <= 1 << 20
    assert "bytes removed" in capsys.readouterr().out


def test_warm_tries_what_requests_will_ask_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A grammar that was warmed is known to the server; a bad one is remembered as bad; a second run does nothing."""
    rig = Rig(tmp_path)
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    bodies = [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"regex": "[ab]+"},
        {"messages": []},
        {"regex": "(?=a)b"},
        {"ebnf": "root ::= missing"},
    ]
    file = tmp_path / "bodies.jsonl"
    file.write_text("".join(json.dumps(body) + "\n" for body in bodies), encoding="utf-8")

    assert rig.run("warm", file) == store_cli.EXIT_DAMAGED

    said = capsys.readouterr().out.splitlines()
    assert "stored" in said[0] or "marked" in said[0]
    assert "stored" in said[1]
    assert "no grammar" in said[2]
    assert said[3].startswith("line 4: refused")
    assert said[4].startswith("line 5: refused")
    assert rig.run("warm", file) == store_cli.EXIT_DAMAGED
    again = capsys.readouterr().out.splitlines()
    assert again[0] == "line 1: known"
    assert again[1] == "line 2: known"
    assert rig.run("verify") == EXIT_OK
    with pytest.raises(ConfigError, match="--bodies"):
        rig.run("warm")
    file.write_bytes(b'{"regex": "\xe9"}\n')
    with pytest.raises(ConfigError, match=r"--bodies.*not UTF-8 at byte 11"):
        rig.run("warm", file)


def test_a_grammar_that_finds_no_room_is_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other bodies are tried all the same; a marker of a megabyte fits into no small store."""
    rig = Rig(tmp_path)
    file = tmp_path / "bodies.jsonl"
    file.write_text('{"regex": "[ab]+"}\n{"messages": []}\n', encoding="utf-8")

    def full(store: GrammarStore, lock: KeyLock, entry: Entry) -> None:
        raise StoreFull("9 bytes find no room in 8")

    monkeypatch.setattr(GrammarStore, "publish", full)
    assert rig.run("warm", file) == store_cli.EXIT_DAMAGED
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "line 1: not stored: 9 bytes find no room in 8 (grammar.store.bytes)",
        "line 2: asks for no grammar",
    ]


def test_the_scope_is_the_servers(tmp_path: Path) -> None:
    """The command looks where a server with the same configuration looks."""
    rig = Rig(tmp_path)
    assert rig.put("a").parent == tmp_path / "store" / scope_name(rig.scope)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["grammar-store"], 2), (["grammar-store", "burn"], 2), (["serve", "list"], 2), (["check-config", "list"], 2)],
)
def test_the_command_line_says_what_it_takes(arguments: list[str], code: int) -> None:
    """A verb belongs to grammar-store, and grammar-store needs one."""
    config = str(ROOT / "conf" / "dev.toml")
    result = subprocess.run(
        [sys.executable, "-m", "dsparkd", *arguments, "--config", config],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert result.returncode == code
    assert "usage" in result.stderr


def test_a_store_that_is_off_is_said_so(tmp_path: Path) -> None:
    """Exit 78, naming the key."""
    checkpoint = ensure_checkpoint()
    file = tmp_path / "off.toml"
    text = (ROOT / "conf" / "dev.toml").read_text(encoding="utf-8")
    text = text.replace('checkpoint = "nano"', f'checkpoint = "{checkpoint}"')
    text = text.replace("[grammar.store]\n", "[grammar.store]\nenabled = false\n")
    file.write_text(text, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "dsparkd", "grammar-store", "list", "--config", str(file)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert result.returncode == EXIT_CONFIG
    assert "grammar.store.enabled" in result.stderr


def test_entries_that_go_meanwhile_are_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server prunes while the command looks."""
    rig = Rig(tmp_path)
    rig.put("a")
    monkeypatch.setattr(GrammarStore, "digests", lambda self: ["gone"])
    assert rig.run("verify") == EXIT_OK
