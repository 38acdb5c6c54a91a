"""The Triton attention against the torch form, in both dtypes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsparkd.errors import InvariantError
from dsparkd.kernels.attention import KeptKeys, TorchAttention, WindowKeys
from dsparkd.kernels.cuda import attention
from dsparkd.kernels.cuda.attention import TritonAttention, norm_and_rotate
from dsparkd.kernels.indexer import Visible
from dsparkd.kernels.rotary import Rotation
from tests.kernels.cuda.attention_case import COUNTS, LONG, PART, POOL, RING, Case, N, W, columns_for, rotation_of
from tests.kernels.cuda.values import DTYPES, close, noise
from tools.gates.kernels import poisoned_memory


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few tiles: the interpreter is slow."""
    monkeypatch.setattr(attention, "PART", PART)


@pytest.fixture(autouse=True, params=["few", "many"])
def way(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, tokens of one part as few wide ones or as many; a device cuts narrow heads in one way alone."""
    if request.param == "few" and device.type == "cpu":
        # As wide ones have, a power of two of columns.
        monkeypatch.setattr(attention, "is_wide", lambda _, width, *__: width & (width - 1) == 0)
    else:
        monkeypatch.setattr(attention, "FEW_TOKENS", 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(8, 64), (5, 72), (70, 32)])
@pytest.mark.parametrize("columns", [None, 0])
def test_it_is_the_torch_form(
    device: torch.device, dtype: torch.dtype, heads: int, width: int, columns: int | None
) -> None:
    """Window from ring and chunk, entries, sink, inverse rotation; widths that fill no tile; more than one head block.

    The torch form is held against double precision by its own test.
    """
    case = Case(heads, width, dtype)
    got = case.run(TritonAttention(), device, columns=columns)
    seen = slice(0, N - 1)  # the torch form knows no token that sees nothing
    expected = case.run(TorchAttention(), torch.device("cpu"), seen, columns=columns)
    assert close(got[seen], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(8, 64), (20, 24)])
def test_long_contexts_are_added_from_their_parts(
    device: torch.device, dtype: torch.dtype, heads: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room that holds anything before; and the same bits where it only suffices for some tokens at a time."""
    case, seen = Case(heads, width, dtype, LONG), slice(0, N - 1)
    with poisoned_memory():
        got = case.run(TritonAttention(), device)
        assert close(got[seen], case.run(TorchAttention(), torch.device("cpu"), seen))
        monkeypatch.setattr(attention, "PART_BYTES", 0)
        for name in ("queries", "chunk", "sources", "slots", "counts", "first"):
            setattr(case, name, getattr(case, name).repeat(3, *[1] * (getattr(case, name).dim() - 1)))
        case.inverse = Rotation(case.inverse.cos.repeat(3, 1, 1), case.inverse.sin.repeat(3, 1, 1))
        assert torch.equal(case.run(TritonAttention(), device, slice(0, 3 * N)), got.repeat(3, 1, 1))


def test_nobody_waits_for_parts_of_an_earlier_call(device: torch.device) -> None:
    """Counters of arrived parts are zero again behind a call, so a form may be used time and again."""
    case, form = Case(8, 64, torch.bfloat16, LONG), TritonAttention()
    with poisoned_memory():
        got = case.run(form, device)
        assert torch.equal(case.run(form, device, slice(2, 6)), got[2:6])
        assert torch.equal(case.run(form, device), got)
    assert form._arrivals is not None
    assert not form._arrivals.any()


def test_all_of_its_ways_are_made_ready_at_start(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """For fewer tokens, for few, for many and for more than one part; no more tokens than that takes."""
    taken: list[tuple[str, int]] = []
    for name in ("attend_few", "attend_many", "_attend_parts"):

        def noted(queries: Tensor, *_: object, name: str = name) -> None:
            taken.append((name, queries.shape[0]))

        monkeypatch.setattr(attention, name, noted)
    monkeypatch.setattr(attention, "FEW_TOKENS", 2)
    monkeypatch.setattr(attention, "IS_COMPILED", True)
    like = torch.empty(0, dtype=torch.bfloat16, device=device)
    for is_wide in (True, False):
        monkeypatch.setattr(attention, "is_wide", lambda *_, is_wide=is_wide: is_wide)
        form = TritonAttention()
        form._processors = 1
        form.prepare(8, 32, 8, like)
    assert taken == [
        ("attend_few", 1),
        ("attend_few", 2),
        ("attend_many", 3),
        ("_attend_parts", 1),
        *(("_attend_parts", n) for n in (1, 2, 3, 1)),
    ]


def test_slots_behind_what_any_token_sees_make_no_parts(device: torch.device) -> None:
    """A captured shape has slots for any context, and says how many of them count."""
    slots = torch.zeros((2, 4 * PART), dtype=torch.int64, device=device)
    seen = TritonAttention().see(slots, Visible(slots, slots[0], slots[0], PART - 1))
    assert seen.slots.shape == (2, PART)
    assert seen.slots.stride(0) == 4 * PART


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_that_sees_nothing_gets_zeros(device: torch.device, dtype: torch.dtype) -> None:
    """Padding of a captured step: the sink alone is left in the denominator."""
    assert not Case(8, 64, dtype).run(TritonAttention(), device)[-1].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [COUNTS, LONG])
def test_a_tokens_bits_do_not_depend_on_its_neighbours(
    device: torch.device, dtype: torch.dtype, counts: list[int]
) -> None:
    """Neither on their number nor on how many entries they see."""
    case = Case(8, 64, dtype, counts)
    whole = case.run(TritonAttention(), device)
    for t, count in enumerate(counts):
        alone = case.run(TritonAttention(), device, slice(t, t + 1), columns=columns_for(count))
        assert torch.equal(alone, whole[t : t + 1]), count


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [COUNTS, LONG])
def test_hidden_keys_are_not_read(device: torch.device, dtype: torch.dtype, counts: list[int]) -> None:
    """0 * NaN is NaN: what no token sees may hold anything."""
    case = Case(8, 64, dtype, counts)
    case.slots[case.slots >= POOL - 20] = 1
    expected = case.run(TritonAttention(), device)
    shown = torch.arange(W) >= case.first[:, None]
    ring, chunk = torch.ones(RING, dtype=torch.bool), torch.ones(N, dtype=torch.bool)
    ring[case.sources[shown & (case.sources >= 0)]] = False
    chunk[-1 - case.sources[shown & (case.sources < 0)]] = False
    pages = torch.ones(POOL, dtype=torch.bool)
    pages[case.slots[torch.arange(case.columns) < case.counts[:, None]]] = False
    assert ring.any()
    assert pages.any()
    case.ring[ring], case.chunk[chunk], case.entries[pages] = torch.nan, torch.nan, torch.nan
    assert torch.equal(case.run(TritonAttention(), device), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_huge_logit_does_not_overflow(device: torch.device, dtype: torch.dtype) -> None:
    """The maximum is taken over window, entries and sink, on either side."""
    case = Case(8, 64, dtype)
    case.queries *= 1e3
    assert case.run(TritonAttention(), device).isfinite().all()
    case.queries /= 1e3
    case.sink[::2] += 1e3
    case.sink[1::2] -= 1e3
    assert case.run(TritonAttention(), device).isfinite().all()


def test_all_that_a_token_sees_is_read_by_row(device: torch.device) -> None:
    """Tokens of one row share its slots: no copy for each, and the same keys as with one."""
    case = Case(8, 64, torch.float32)
    case.counts[-2] = 100
    rows = torch.tensor([0, 0, 1, 1, 0, 1, 1])
    visible = Visible(torch.randint(1, POOL, (2, case.columns)), rows, case.counts, case.columns)
    case.slots = visible.expand()[0]
    expected = case.run(TritonAttention(), device)

    moved = Visible(visible.slots.to(device), rows.to(device), case.counts.to(device), case.columns)
    entries = TritonAttention().see(case.entries.to(device), moved)
    assert entries.slots.data_ptr() == moved.slots.data_ptr()
    window = WindowKeys(*(x.to(device) for x in (case.ring, case.chunk, case.sources, case.first)), False)
    output = torch.full_like(case.queries, torch.nan, device=device)
    inverse = Rotation(case.inverse.cos.to(device), case.inverse.sin.to(device))
    TritonAttention().attend(case.queries.to(device), window, entries, case.sink.to(device), inverse, output)
    assert torch.equal(output.cpu(), expected)


def heads_case(heads: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Rotation]:
    """Queries, a latent slice of a wider product, norms and a rotation."""
    query, wide = noise(N, heads * width, seed=8).to(dtype), noise(N, width + 8, seed=9).to(dtype)
    return query, wide[:, 8:], 1 + 0.2 * noise(heads + 1, width, seed=10), rotation_of(N, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "width"), [(8, 64), (3, 50), (7, 64)])
def test_heads_are_normed_weighed_and_rotated(device: torch.device, dtype: torch.dtype, heads: int, width: int) -> None:
    """T-36: the queries lie where the input lay, and have the bits that another place would get; odd counts too."""
    query, latent, norms, rotation = heads_case(heads, width, dtype)
    expected = TorchAttention().heads(query, latent, norms, rotation, 1e-6)
    there = [x.to(device) for x in (query, norms, rotation.cos, rotation.sin)]
    on_device, turn = there[0], Rotation(there[2], there[3])
    apart = torch.full((N, heads, width), torch.nan, dtype=dtype, device=device)
    keys_apart = torch.full((N, width), torch.nan, dtype=dtype, device=device)
    wide = torch.cat((latent.new_zeros(N, 8), latent), 1).to(device)
    norm_and_rotate(on_device, wide[:, 8:], there[1], turn, 1e-6, apart, keys_apart)

    queries, keys = TritonAttention().heads(on_device, wide[:, 8:], there[1], turn, 1e-6)

    assert queries.data_ptr() == on_device.data_ptr()
    assert torch.equal(queries, apart)
    assert torch.equal(keys, keys_apart)
    assert close(queries.cpu(), expected[0])
    assert close(keys.cpu(), expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [7, 8])
def test_keys_are_kept_as_they_are_made(device: torch.device, dtype: torch.dtype, heads: int) -> None:
    """P-13: of the first tokens, where they are told to and nowhere else; padding goes to -1. Queries and keys are as
    when nothing is kept, and the torch form keeps alike."""
    query, latent, norms, rotation = heads_case(heads, 64, dtype)
    turn = Rotation(rotation.cos.to(device), rotation.sin.to(device))
    whole = noise(N + 4, 64, seed=11).to(dtype)
    dst = torch.arange(N - 1).flip(0) + 1
    dst[2] = -1

    def run(kept: KeptKeys | None) -> tuple[Tensor, Tensor]:
        return TritonAttention().heads(query.clone().to(device), latent.to(device), norms.to(device), turn, 1e-6, kept)

    expected, keys = run(None)
    before = whole.to(device)
    after = before.clone()
    queries, same_keys = run(KeptKeys(after[1:], dst.to(device)))

    assert torch.equal(queries, expected)
    assert torch.equal(same_keys, keys)
    stored = [t for t in range(N - 1) if t != 2]
    for t in stored:
        before[1 + int(dst[t])] = keys[t]
    assert torch.equal(after, before)
    ring = whole[1:].clone()
    _, torch_keys = TorchAttention().heads(query, latent, norms, rotation, 1e-6, KeptKeys(ring, dst.clamp(min=0)))
    assert torch.equal(ring[dst[stored]], torch_keys[stored])


def test_a_partial_overlap_of_input_and_output_is_refused(device: torch.device) -> None:
    """T-36: a shifted view would be overwritten before it is read."""
    storage = noise(2 * N * 8 * 64).to(device)
    size = N * 8 * 64
    query = storage[:size].view(N, 8 * 64)
    _, latent, norms, rotation = heads_case(8, 64, torch.float32)
    turn = Rotation(rotation.cos.to(device), rotation.sin.to(device))
    for shift in (1, 64, size - 1):
        queries = storage[shift : shift + size].view(N, 8, 64)
        with pytest.raises(InvariantError, match="overlap"):
            norm_and_rotate(query, latent.to(device), norms.to(device), turn, 1e-6, queries, query.new_empty((N, 64)))
    behind = storage[size:].view(N, 8, 64)
    norm_and_rotate(query, latent.to(device), norms.to(device), turn, 1e-6, behind, query.new_empty((N, 64)))


def test_padding_rows_stay_finite_and_nothing_beside_the_rows_is_written(device: torch.device) -> None:
    """T-36: a row of zeros has no length to divide by, and sentinels before and behind the tensors keep their bits."""
    size = N * 3 * 64
    storage = torch.full((size + 2 * 64,), 7.0, device=device)
    query = storage[64:-64].view(N, 3 * 64)
    values, latent, norms, rotation = heads_case(3, 64, torch.float32)
    values[-2:] = 0
    query.copy_(values)
    turn = Rotation(rotation.cos.to(device), rotation.sin.to(device))
    queries, keys = TritonAttention().heads(query, latent.to(device), norms.to(device), turn, 1e-6)
    assert (storage[:64] == 7).all()
    assert (storage[-64:] == 7).all()
    assert not queries[-2:].any()
    assert queries.isfinite().all()
    assert keys.isfinite().all()
