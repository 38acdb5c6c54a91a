"""The experts' Triton form beside the torch form: layout, packed against dense weights, loads of every kind."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from dsparkd.kernels.crossing import Parting
from dsparkd.kernels.cuda.experts import TritonExperts, choose_tiles, lay_out, second_tiles, tiles_of
from dsparkd.kernels.cuda.tile import Tiles, turn
from dsparkd.kernels.experts import ExpertShard, TorchExperts
from dsparkd.kernels.weight import Format, decode, dense
from tests.kernels.cuda.values import NUMBER, Peers, arrive, noise
from tools.gates.kernels import poisoned_memory
from tools.kernel_cases.weights import random_weight

FIRST, COUNT, ALL = 3, 4, 10


def make_shard(form: Format, device: torch.device, width: int = 96, expert_width: int = 64) -> ExpertShard:
    w13 = tuple(random_weight(form, 2 * expert_width, width, e, device) for e in range(COUNT))
    w2 = tuple(random_weight(form, width, expert_width, 50 + e, device) for e in range(COUNT))
    return ExpertShard(FIRST, w13, w2, limit=1.5)


def make_rows(rows: int, top_k: int, device: torch.device, width: int = 96) -> tuple[Tensor, Tensor, Tensor]:
    """x bfloat16, distinct ids ascending with padding at the end, shares."""
    noise = torch.Generator().manual_seed(rows)
    ids = torch.rand((rows, ALL), generator=noise).argsort(1)[:, :top_k].sort(1).values.int()
    ids[rows - rows // 8 :] = ALL
    x, shares = torch.randn((rows, width), generator=noise).bfloat16(), torch.rand((rows, top_k), generator=noise)
    return x.to(device), ids.contiguous().to(device), shares.to(device)


def total_of(kernel: TritonExperts, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
    """What the kernel makes of plain inputs."""
    return kernel(turn(x) if kernel.takes_turned else x, ids, shares)


@pytest.mark.parametrize(("rows", "top_k"), [(7, 3), (50, 4), (700, 4), (2800, 3)])
def test_choices_are_laid_out_by_expert_in_the_order_of_rows(device: torch.device, rows: int, top_k: int) -> None:
    """In whole tiles of one expert each; places point back at the choices, and at nothing for others' experts. Of many
    more are looked at in one go."""
    _, ids, _ = make_rows(rows, top_k, device)
    layout = lay_out(ids, FIRST, COUNT, 16)
    choices, experts, places = layout.choices.tolist(), layout.tile_experts.tolist(), layout.places.flatten().tolist()
    flat = ids.flatten().tolist()
    wanted: list[int] = []
    for expert in range(COUNT):
        own = [index for index, found in enumerate(flat) if found == FIRST + expert]
        wanted += own + [-1] * (-len(own) % 16)
    assert choices[: len(wanted)] == wanted
    tiles = len(wanted) // 16
    assert all(flat[index] == FIRST + experts[slot // 16] for slot, index in enumerate(wanted) if index >= 0)
    assert experts[tiles:] == [-1] * (len(experts) - tiles)
    served = [FIRST <= found < FIRST + COUNT for found in flat]
    assert [choices[place] if place >= 0 else None for place in places] == [
        index if own else None for index, own in enumerate(served)
    ]


@pytest.mark.parametrize("rows", [17, 33])
def test_the_layout_has_room_for_the_worst_distribution(device: torch.device, rows: int) -> None:
    """All rows at one expert, or each expert a row past a whole tile."""
    same = torch.full((rows, 1), FIRST + 1, dtype=torch.int32, device=device)
    layout = lay_out(same, FIRST, COUNT, 16)
    assert sorted(layout.choices[layout.places.flatten().long()].tolist()) == list(range(rows))
    rest = rows // COUNT // 16 * 16 + 1  # a row past whole tiles
    spread = (FIRST + torch.arange(COUNT * rest, device=device).int() % COUNT)[:, None].contiguous()
    layout = lay_out(spread, FIRST, COUNT, 16)
    assert (layout.tile_experts >= 0).sum() == (rest // 16 + 1) * COUNT


@pytest.mark.parametrize("form", list(Format))
def test_choices_of_one_tile_stay_where_they_are_and_give_the_same_bits(device: torch.device, form: Format) -> None:
    """Rows that share experts, experts of the other shard; beside more rows the choices are laid out."""
    kernel = TritonExperts(make_shard(form, device, 128, 128))
    x, ids, shares = make_rows(20, 4, device, 128)
    ids[1] = ids[0]
    assert not lay_out(ids, FIRST, COUNT, 16).is_in_place
    beside = kernel(x, ids, shares)
    assert ((ids[:4] >= FIRST) & (ids[:4] < FIRST + COUNT)).any()
    assert lay_out(ids[:4], FIRST, COUNT, 16).is_in_place
    with poisoned_memory():
        assert torch.equal(kernel(x[:4], ids[:4], shares[:4]), beside[:4])
        assert torch.equal(kernel(x[3:4], ids[3:4], shares[3:4]), beside[3:4])


@pytest.mark.parametrize(("rows", "gap"), [(2, 5), (2, 8), (20, 5), (260, 8)])
def test_rows_that_lie_apart_give_the_bits_of_those_side_by_side(device: torch.device, rows: int, gap: int) -> None:
    """As ranks exchange them: inputs, shares and ids of a row are one stretch. Begun at 16 bytes or not."""
    kernel = TritonExperts(make_shard(Format.FP4, device, 128, 64))
    x, ids, shares = make_rows(rows, 4, device, 128)
    wide = torch.zeros((rows, 128 + gap), dtype=x.dtype, device=device)
    words = torch.zeros((rows, 2, 4 + gap), dtype=torch.int32, device=device)
    wide[:, :128], words[:, 0, :4], words[:, 1, :4] = x, ids, shares.view(torch.int32)
    apart = kernel(wide[:, :128], words[:, 0, :4], words[:, 1, :4].view(torch.float32))
    assert torch.equal(apart, kernel(x, ids, shares))


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize(("width", "expert_width"), [(96, 64), (256, 128), (64, 40)])
def test_the_sum_is_that_of_the_torch_form(device: torch.device, form: Format, width: int, expert_width: int) -> None:
    """Clamps that bind, padding rows, experts of the other shard. Intermediate roundings to bfloat16 differ a digit."""
    shard, rows = make_shard(form, device, width, expert_width), make_rows(20, 3, device, width)
    got, expected = total_of(TritonExperts(shard), *rows), TorchExperts(shard)(*rows)
    assert (got - expected).abs().max() < 2e-2 * expected.abs().max()
    assert not got[-2:].any()


def test_float32_weights_are_multiplied_in_float32(device: torch.device) -> None:
    """The device's float32 form is what its gates compare with the cpu."""
    packed = make_shard(Format.FP4, device)
    w13, w2 = (tuple(dense(decode(weight, torch.float32)) for weight in part) for part in (packed.w13, packed.w2))
    shard = ExpertShard(FIRST, w13, w2, 1.5)
    x, ids, shares = make_rows(20, 3, device)
    got, expected = TritonExperts(shard)(x.float(), ids, shares), TorchExperts(shard)(x.float(), ids, shares)
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("form", [Format.FP4, Format.FP8])
def test_tile_shapes_give_the_same_bits(device: torch.device, form: Format) -> None:
    """Gate and up rows as one operand or one after the other; inputs through shared memory or held."""
    shard, rows = make_shard(form, device, 256, 128), make_rows(9, 3, device, 256)
    others = Tiles(16, 64, 128, 4, 3), Tiles(64, 128, 128, 8, 3), Tiles(64, 256, 128, 16, 3, held=True)
    shapes = (*tiles_of(form, torch.bfloat16), *others)
    made = [TritonExperts(shard, lambda *_, own=tiles: own)(*rows) for tiles in shapes]  # type: ignore[misc]
    assert all(torch.equal(one, made[0]) for one in made[1:])


@pytest.mark.parametrize("form", [Format.FP4, Format.FP8])
def test_every_tile_shape_that_a_load_asks_for_is_compiled_at_start(device: torch.device, form: Format) -> None:
    """No step waits for a compiler; and none is compiled in vain."""
    asked = {choose_tiles(rows * 6, 128, form, torch.bfloat16) for rows in range(1, 9000, 7)}
    assert asked == set(tiles_of(form, torch.bfloat16))
    assert choose_tiles(10**6, 128, form, torch.float32) in tiles_of(form, torch.float32)
    TritonExperts(make_shard(form, device)).compile()


ALIGNMENT = """
from dsparkd.kernels.cuda import experts
for kernel in (experts._lay_out_kernel, experts._gate_up_kernel, experts._down_kernel, experts._combine):
    marked = [param.name for param in kernel.params if param.do_not_specialize_on_alignment]
    print(*marked, sep="+")
"""


def test_ids_compile_nothing_new_wherever_they_begin_in_a_row() -> None:
    """Behind six shares they begin at no multiple of 16 bytes, and what is compiled at start has them begin there."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = [sys.executable, "-W", "ignore", "-c", ALIGNMENT]
    result = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    wanted = ["expert_ids", "choices+tile_experts", "choices+tile_experts", "places"]
    assert result.stdout.split() == wanted


COMPILE = """
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from dsparkd.kernels.cuda import experts
from dsparkd.kernels.weight import Format
from tools.kernel_cases.weights import random_weight

class Device:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda _: 0)

run, made = JITFunction.run, []
def compiled(kernel, *args, grid, warmup, **options):
    made.append(run(kernel, *args, grid=grid, warmup=True, **options))

JITFunction.run = compiled
driver.set_active(Device())
experts.operand = lambda _: tl.bfloat16
w13, w2 = (random_weight(Format.FP4, height, 256, 0, torch.device("cpu")) for height in (512, 256))
experts.TritonExperts(experts.ExpertShard(0, (w13,) * 2, (w2,) * 2, 1.0)).compile()
print(len({one.name + str(one.hash) for one in made}), max(one.metadata.shared for one in made))
"""


def test_all_kernels_compile_without_a_device() -> None:
    """The interpreter accepts what the compiler refuses, such as a function of two shapes. The memory suffices."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = [sys.executable, "-W", "ignore", "-c", COMPILE]
    result = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    kernels, shared = map(int, result.stdout.split())
    # Four shapes of both products; layouts and the sum in two forms and more; what a weight is taken over by.
    assert kernels > 2 * 4 + 4
    assert shared <= 227 << 10


def test_tiles_grow_with_the_load() -> None:
    """Few rows a tile waste no work on a decode step, many read weights seldom in a prefill."""
    sizes = [choose_tiles(rows * 6, 128, Format.FP4, torch.bfloat16).rows for rows in (1, 768, 3072, 4096, 16384)]
    assert sizes == [16, 32, 64, 128, 128]


def test_the_second_product_of_middle_loads_has_wider_tiles() -> None:
    """Its inputs are read by as many fewer programs; of FP4 alone, whose tiles of 256 outputs were measured."""
    few, middle = tiles_of(Format.FP4, torch.bfloat16)[:2]
    assert second_tiles(few, Format.FP4) == few
    assert (second_tiles(middle, Format.FP4).rows, second_tiles(middle, Format.FP4).outputs) == (middle.rows, 256)
    assert second_tiles(middle, Format.FP8) == middle


@pytest.mark.parametrize("rows", [5600, 7600])
def test_the_largest_tiles_are_not_taken_where_a_second_would_hold_little(rows: int) -> None:
    """131 and 178 rows an expert: three tiles of 64 do less than two of 128."""
    assert choose_tiles(rows * 6, 128, Format.FP4, torch.bfloat16).rows == 64


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("counts", [(1, 1), (2, 6), (6, 2), (0, 5), (5, 0)])
def test_sums_of_the_peers_rows_cross_to_it(device: torch.device, rank: int, counts: tuple[int, int]) -> None:
    """What a rank keeps, and what the peer gets, are the bits of one sum over all rows; the peer's sums for this rank's
    rows come to lie as they came. In place or laid out, whoever has more rows."""
    kernel, rows = TritonExperts(make_shard(Format.FP4, device, 128, 64)), make_rows(sum(counts), 4, device, 128)
    both = kernel(*rows).split(counts)
    near = Peers(device, 1000)
    coming, wanted = noise(counts[rank], 128, seed=5).to(device), near.theirs.clone()
    arrive(near.box(near.ours, 0), coming, NUMBER)
    arrive(near.box(wanted, 0), both[1 - rank], NUMBER)
    received = torch.empty_like(coming)
    near.words.begin_step()
    kept = kernel(*rows, Parting(near.words.cross(received), counts, rank))
    assert torch.equal(kept, both[rank])
    assert torch.equal(received, coming)
    assert torch.equal(near.theirs, wanted)
    assert not near.ours.any()
