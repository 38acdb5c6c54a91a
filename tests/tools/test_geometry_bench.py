"""The bench of the released geometry: its files, its floors, and what its ranks do, on the small checkpoint's cpu."""

from __future__ import annotations

import asyncio
import json
import math
import tomllib
from pathlib import Path

import pytest
import torch

from dsparkd.config import Hardware, load, resolve
from dsparkd.kernels.router import Routes, pack
from dsparkd.kv.geometry import PoolSizes
from dsparkd.kv.pool import KVPool
from dsparkd.model.config import load_model_config, parse_model_config
from dsparkd.model.moe import unpack
from tests.model.values import small_values
from tools import flash_files, geometry_rank
from tools.bench import geometry
from tools.geometry_rank import Reflected, Span, kernel_modules, own_times, part_of
from tools.harness import ROOT, merge, to_toml
from tools.roofline import Roofline

NANO = ROOT / "conf" / "nano"
CPU = torch.device("cpu")
COPY_BYTES_S = 4.3e12  # of an H200, as the published floors were computed


def test_the_files_are_the_released_config_and_tokenizer(tmp_path: Path) -> None:
    """What the server needs without weights; a tokenizer without the markers would fail at the first chat."""
    flash_files.write_files(tmp_path, flash_files.flash_values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "tokenizer.json"]
    config = load_model_config(tmp_path)
    assert (config.num_hidden_layers, config.hidden_size, config.n_routed_experts) == (43, 4096, 256)
    assert (config.compress_ratios.count(4), config.compress_ratios.count(128)) == (21, 20)
    assert config.gamma == 5


def test_the_first_layers_keep_the_geometry_and_a_drafter() -> None:
    """One short model has each kind of layer; fewer layers than the drafter taps are none."""
    whole = flash_files.flash_values()
    config = parse_model_config(flash_files.first_layers(whole, 5))
    assert config.compress_ratios == (0, 0, 4, 128, 4)
    assert config.dspark is not None
    assert config.dspark.target_layer_ids == (2, 3, 4)
    assert config.hidden_size == 4096
    with pytest.raises(ValueError, match="2 layers"):
        flash_files.first_layers(whole, 2)


@pytest.mark.parametrize(("concurrency", "tolerance"), [(1, 0.12), (16, 0.05), (64, 0.05), (128, 0.05)])
def test_floors_are_those_that_others_compute(concurrency: int, tolerance: float) -> None:
    """The incumbent's floors were computed elsewhere, from the same geometry, with a copy's bandwidth."""
    floors = Roofline(parse_model_config(flash_files.flash_values()))
    rows = (-(-concurrency // 2), concurrency // 2)
    floor = floors.decode(rows, 1, 1152, drafts=False)
    expected_ms = geometry.INCUMBENT[concurrency].floor_ms
    assert floor.num_bytes / COPY_BYTES_S * 1e3 == pytest.approx(expected_ms, rel=tolerance)


def test_floors_grow_with_what_a_step_holds() -> None:
    """Rows, contexts, windows and drafts each cost; a prefill is bound by arithmetic."""
    floors = Roofline(parse_model_config(flash_files.flash_values()))
    plain = floors.decode((8, 8), 1, 1024, drafts=False)
    assert floors.decode((9, 8), 1, 1024, drafts=False).num_bytes > plain.num_bytes
    assert floors.decode((8, 9), 1, 1024, drafts=False).expert_bytes > plain.expert_bytes
    assert floors.decode((8, 8), 1, 8192, drafts=False).cache_bytes > plain.cache_bytes
    assert floors.decode((8, 8), 6, 1024, drafts=False).flops == pytest.approx(6 * plain.flops)
    drafted = floors.decode((8, 8), 6, 1024, drafts=True)
    assert drafted.weight_bytes > plain.weight_bytes
    prefill = floors.prefill((8192, 8192))
    assert prefill.seconds == pytest.approx(prefill.flops / 989e12)
    # 13.3 billion weights act on a token, two operations each, and attention on top; the head on the last one alone.
    assert prefill.flops / 8192 == pytest.approx(2 * 12.8e9, rel=0.15)


@pytest.mark.parametrize(
    ("context", "entry_bytes"),
    [(1024, 21 * 256 * 1024 + 20 * 8 * 1024), (8192, 21 * (512 * 1024 + 2048 * 256) + 20 * 64 * 1024)],
)
def test_a_row_reads_its_window_and_the_entries_that_are_chosen(context: int, entry_bytes: int) -> None:
    """Of long contexts the indexer's keys are all read and 512 entries of them; every HCA entry is."""
    floors = Roofline(parse_model_config(flash_files.flash_values()))
    floor = floors.decode((3, 3), 1, context, drafts=False)
    assert floor.cache_bytes == 3 * (43 * 128 * 1024 + entry_bytes)


def packed_rows() -> tuple[torch.Tensor, Routes]:
    """Three tokens and one of padding, in the small geometry: three of eight experts each."""
    ids = torch.tensor([[0, 3, 4], [1, 2, 7], [5, 6, 7], [8, 8, 8]], dtype=torch.int32)
    routes = Routes(torch.arange(12.0).view(4, 3), ids)
    return pack(torch.randn((4, 64), generator=torch.Generator().manual_seed(0)), routes), routes


def test_a_rank_alone_has_the_load_of_one_of_two() -> None:
    """Each choice of its tokens is computed here exactly once: as it is, or as its mirror image for the peer."""
    config = parse_model_config(small_values())
    rows, routes = packed_rows()
    exchange = Reflected(config)
    exchange.begin_step((4, 4))
    x, ids, shares = unpack(exchange.gather(rows), torch.float32, 64, 3)
    assert torch.equal(x[:4], x[4:])
    assert torch.equal(ids[:4], routes.expert_ids)
    assert ids[4:].tolist() == [[3, 4, 7], [0, 5, 6], [0, 1, 2], [8, 8, 8]]
    assert torch.equal(shares[4:7], routes.shares[:3].flip(1))
    own = ids < 4
    assert int(own[:3].sum() + own[4:7].sum()) == 9
    partial = torch.arange(8.0 * 64).view(8, 64)
    both = exchange.combine(partial)
    assert torch.equal(both[0], partial[:4])
    assert torch.equal(both[1], partial[4:])


def test_a_rank_alone_refuses_rows_that_its_peer_has_not() -> None:
    """The mirror image of four rows is four rows."""
    with pytest.raises(AssertionError):
        Reflected(parse_model_config(small_values())).begin_step((4, 0))


def test_noise_spares_what_padding_reads() -> None:
    """Page 0 and slot 0 are zero by contract; every other row is different from its neighbour."""
    config = parse_model_config(small_values())
    g = config.kv_geometry(256, "float32", drafts=True)
    pool = KVPool(g, PoolSizes(3, 3, 1), torch.float32, CPU)
    geometry_rank.fill(pool)
    for tensor, null in (
        (pool.window, g.window_ring_rows),
        (pool.csa_entries, g.csa_entries_per_page),
        (pool.csa_keys, g.csa_entries_per_page),
        (pool.hca_entries, g.hca_entries_per_page),
        (pool.hca_rows, g.hca_ring_rows),
        (pool.draft_keys, g.draft_ring_rows),
    ):
        assert not tensor[:, :null].any()
        assert float(tensor[:, null:].std()) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize(
    ("spans", "times"),
    [
        ([], {}),
        ([Span(0.0, 2.0, "a"), Span(1.0, 3.0, "b"), Span(5.0, 6.0, "a")], {"a": 3.0, "b": 1.0}),
        ([Span(0.0, 9.0, "long"), Span(1.0, 2.0, "short")], {"long": 8.0, "short": 1.0}),
        ([Span(0.0, 4.0, "first"), Span(1.0, 6.0, "waits"), Span(2.0, 7.0, "waits for it")],
         {"first": 4.0, "waits": 2.0, "waits for it": 1.0}),
        ([Span(0.0, 3.0, "a"), Span(0.0, 3.0, "b")], {"a": 3.0, "b": 0.0}),
    ],
)  # fmt: skip
def test_each_moment_belongs_to_the_kernel_that_the_others_wait_for(spans: list[Span], times: dict[str, float]) -> None:
    """A kernel that is launched early waits beside its predecessor: both together would be longer than the step."""
    assert own_times(spans) == times


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("_gate_up_kernel", "experts"),
        ("_linear_kernel", "linear"),
        ("_activate", "feed_forward"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "exchange"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::elementwise_kernel", geometry_rank.OTHER),
    ],
)
def test_kernels_belong_to_the_modules_that_hold_them(name: str, part: str) -> None:
    """A table in which most time is `other` says nothing; nobody has to keep it when a kernel is renamed."""
    assert part_of(name, kernel_modules()) == part


def run(*arguments: str, out: Path) -> dict[str, object]:
    """Run the bench on the small checkpoint's geometry."""
    own = ("--device", "cpu", "--dtype", "float32", "--files", str(NANO), "--out", str(out), "--json")
    assert geometry.main([*arguments, *own]) == 0
    report: dict[str, object] = json.loads(out.read_text(encoding="utf-8"))
    return report


def kinds(report: dict[str, object]) -> list[str]:
    rows = report["rows"]
    assert isinstance(rows, list)
    return [row["kind"] for row in rows]


def rows_of(report: dict[str, object], kind: str) -> list[dict[str, object]]:
    rows = report["rows"]
    assert isinstance(rows, list)
    return [row for row in rows if row["kind"] == kind]


def test_two_ranks_report_every_kind_of_step_beside_its_floor(tmp_path: Path) -> None:
    """The steps part as it runs on two GPUs, without profiles."""
    report = run(
        *("--part", "steps", "--rows", "2", "--contexts", "300", "--prefill", "128", "--rounds", "1", "--no-profile"),
        out=tmp_path / "out.json",
    )
    assert kinds(report) == ["start", "prefill", "decode", "decode", "end"]
    for row, gained in zip(rows_of(report, "decode"), (1, 3.5), strict=True):
        assert (row["rows"], row["drafts"]) == (2, gained > 1)
        assert row["simulated_acceptance"] == (3.5 if row["drafts"] else None)
        assert row["output_tokens_per_s"] == pytest.approx(2 * 2 * gained / float(str(row["ms"])) * 1e3, rel=0.01)


def test_a_rank_alone_says_where_the_time_goes(tmp_path: Path) -> None:
    """By parts of the model, and while nothing ran."""
    report = run(
        *("--part", "steps", "--alone", "--rows", "1", "--contexts", "300", "--prefill", "128", "--rounds", "1"),
        *("--speculation", "off"),
        out=tmp_path / "out.json",
    )
    assert kinds(report) == ["start", "prefill", "decode", "profile", "profile", "end"]
    for row in rows_of(report, "profile"):
        assert float(str(row["busy_ms"])) > 0
        assert row["parts"]
        assert row["kernels"]


def test_past_its_seconds_a_run_begins_nothing_and_still_ends_well(tmp_path: Path) -> None:
    """Machine time is bounded: what has been measured by then is in the file."""
    assert kinds(run("--part", "all", "--seconds", "0", out=tmp_path / "out.json")) == []
    report = run("--part", "steps", "--alone", "--rows", "1", "--seconds", "0.5", out=tmp_path / "out.json")
    assert kinds(report) == ["start", "end"]
    assert report["alone"]


def test_a_rank_that_fails_is_reported_with_what_it_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a machine that is given back at once, the reason has to be in the output."""
    (tmp_path / "config.json").write_text((NANO / "config.json").read_text(encoding="utf-8"), encoding="utf-8")
    arguments = ["--part", "steps", "--alone", "--device", "cpu", "--dtype", "float32", "--files", str(tmp_path)]
    assert geometry.main(arguments) == 1
    assert "tokenizer.json: cannot be read" in capsys.readouterr().out


def test_a_round_is_reduced_to_its_figures() -> None:
    """Tokens after the first are what a token's time is taken of."""
    streams = [geometry.Stream(0.0, 1.0 + i / 100, 3.0 + i / 100, 101) for i in range(100)]
    row = geometry.headline_row(streams, 4, 10.0)
    assert row["output_tokens_per_s"] == 1010.0
    assert row["token_ms"] == 20.0
    assert (row["ttft_p50_s"], row["ttft_p99_s"]) == (1.495, 1.98)


def test_steps_stand_beside_the_incumbents_where_it_measured_some() -> None:
    """Another context, or another number of rows, is another step."""
    assert geometry.incumbent_ms(128, 1152, drafts=False) == 38.7
    assert geometry.incumbent_ms(64, 1024, drafts=True) == 66.3
    assert geometry.incumbent_ms(128, 1024, drafts=True) is None
    assert geometry.incumbent_ms(128, 8192, drafts=False) is None
    assert geometry.incumbent_ms(2, 1024, drafts=False) is None
    assert geometry.mean_step((10.0, 4.0), (40.0, 14.0)) == 3.0
    assert geometry.mean_step((10.0, 4.0), (10.0, 4.0)) == 1.0


def test_stages_end_where_the_log_says() -> None:
    """Rank 0's, counted from the start."""

    def event(second: int, name: str, **fields: object) -> dict[str, object]:
        return {"ts": f"2026-11-30T00:00:{second:02d}.000000Z", "event": name, **fields}

    events = [
        event(1, "starting"),
        event(2, "start_progress", child="rank 0", stage="weights", done=1, total=2),
        event(4, "start_progress", child="rank 0", stage="weights", done=2, total=2),
        event(5, "start_progress", child="rank 1", stage="pools", done=2, total=2),
        event(9, "listening"),
    ]
    assert geometry.stage_ends(events) == {"weights": 3.0, "listening": 8.0}


@pytest.mark.parametrize("ends", ["whole", "short", "error"])
async def test_a_stream_is_timed_by_its_events_and_must_be_whole(ends: str) -> None:
    """A server that ends early would otherwise look fast."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"}}")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(3):
            writer.write(b'data: {"choices":[{"text":"a"}]}\n\n')
            await writer.drain()
            await asyncio.sleep(0.01)
        if ends == "error":
            writer.write(b'data: {"error":{"message":"no"}}\n\n')
        count = 3 if ends == "whole" else 2
        writer.write(b'data: {"choices":[],"usage":{"completion_tokens":%d}}\n\ndata: [DONE]\n\n' % count)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        if ends == "whole":
            stream = await geometry.stream_one(port, "m", [1, 2], 3)
            assert stream.output_tokens == 3
            assert stream.last_s - stream.first_s > 0.015
            assert not math.isclose(stream.sent_s, stream.first_s)
        else:
            with pytest.raises(RuntimeError, match=r"ended after 2|answered"):
                await geometry.stream_one(port, "m", [1, 2], 3)


@pytest.mark.parametrize(
    ("words", "shared", "pools"),
    [
        ([], False, {"device_bytes": None, "device_fraction": 0.75}),
        (["--shared-device"], True, {"device_bytes": geometry.SHARED_POOL_BYTES}),
        (["--device", "cpu"], False, {}),
    ],
)
def test_the_server_is_configured_for_its_devices(
    tmp_path: Path, words: list[str], shared: bool, pools: dict[str, object]
) -> None:
    """What the server would refuse costs a start on a machine that is lent by the minute."""
    tables = geometry.server_tables(NANO, geometry.parse(words), True)
    assert tables["engine"]["shared_device"] is shared
    assert tables["kv"] == pools
    path = tmp_path / "config.toml"
    base = tomllib.loads((ROOT / "conf" / "dev.toml").read_text(encoding="utf-8"))
    path.write_text(to_toml(merge(base, tables)), encoding="utf-8")
    config = resolve(load(path), Hardware(num_cuda_devices=2))
    assert (config.engine.weights, config.dspark.enabled) == ("random", True)
