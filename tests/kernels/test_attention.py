"""Attention over gathered keys, torch and C form, against double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dsparkd.kernels.attention import AttentionKernel, CpuAttention, EntryKeys, TorchAttention, WindowKeys, bind
from dsparkd.kernels.cuda.attention import TritonAttention
from dsparkd.kernels.rotary import Rotation

FORMS: list[AttentionKernel] = [TorchAttention(), CpuAttention()]
N, W, E = 9, 16, 128  # tokens, window, entry columns
COUNTS = torch.tensor([0, 1, 63, 64, 65, 70, 100, 127, 128])
FIRST = torch.tensor([15, 3, 0, 0, 0, 0, 0, 0, 0])


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """Random queries and keys of nine tokens, and rotations for them."""

    def __init__(self, heads: int, width: int) -> None:
        draw = torch.Generator().manual_seed(1)
        self.queries, self.sink = noise(N, heads, width), noise(heads, seed=3)
        self.ring, self.chunk = noise(40, width, seed=4), noise(N, width, seed=5)
        self.sources = torch.randint(-N, 40, (N, W), generator=draw)
        self.entries = noise(300, width, seed=6)
        self.slots = torch.randint(0, 300, (N, E), generator=draw)
        angles = noise(N, 1, 4, seed=7).repeat_interleave(2, 2)
        self.inverse = Rotation(angles.cos(), angles.sin() * torch.tensor([-1.0, 1.0] * 4))

    def window(self, part: slice = slice(0, N)) -> WindowKeys:
        return WindowKeys(self.ring, self.chunk, self.sources[part], FIRST[part], not FIRST[part].any())

    def run(self, form: AttentionKernel, part: slice = slice(0, N), width: int = E) -> Tensor:
        entries = EntryKeys(self.entries, self.slots[part, :width].contiguous(), COUNTS[part]) if width else None
        output = torch.full_like(self.queries[part], torch.nan)
        form.attend(self.queries[part], self.window(part), entries, self.sink, self.inverse.rows(part), output)
        return output

    def reference(self) -> Tensor:
        outputs = []
        for t in range(N):
            sources = self.sources[t, FIRST[t] :].tolist()
            keys = [self.ring[s] if s >= 0 else self.chunk[-1 - s] for s in sources]
            keys += [self.entries[s] for s in self.slots[t, : COUNTS[t]].tolist()]
            stacked = torch.stack(keys).double()
            shares = (self.queries[t].double() @ stacked.t()).exp()
            output = shares @ stacked / (shares.sum(1, keepdim=True) + self.sink.double().exp()[:, None])
            tail = torch.view_as_complex(output[:, -8:].unflatten(1, (4, 2)).contiguous())
            angle = torch.complex(self.inverse.cos[t, 0, ::2].double(), self.inverse.sin[t, 0, 1::2].double())
            output[:, -8:] = torch.view_as_real(tail * angle).flatten(1)
            outputs.append(output)
        return torch.stack(outputs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "width"), [(8, 64), (5, 72), (1, 50), (4, 128)])
def test_the_sink_is_in_the_denominator_alone(form: AttentionKernel, heads: int, width: int) -> None:
    """o = sum e^l k / (sum e^l + e^sink) over the keys that a token sees, rotated back at the query."""
    case = Case(heads, width)
    case.queries *= width**-0.5
    assert torch.allclose(case.run(form).double(), case.reference(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_tokens_bits_do_not_depend_on_its_neighbours(form: AttentionKernel) -> None:
    """Neither on their number nor on how many entries they see, none included."""
    case = Case(8, 64)
    whole = case.run(form)
    for t, count in enumerate(COUNTS.tolist()):
        alone = case.run(form, slice(t, t + 1), width=-(-count // 64) * 64)
        assert torch.equal(alone, whole[t : t + 1]), count


@pytest.mark.parametrize("form", FORMS)
def test_hidden_keys_are_not_read(form: AttentionKernel) -> None:
    """Masking selects: what lies behind a hidden index must not matter, though the torch form gathers it."""
    case = Case(8, 64)
    expected = case.run(form)
    hidden = torch.arange(E) >= COUNTS[:, None]
    case.slots[hidden] = 0
    used = torch.zeros(300, dtype=torch.bool)
    used[case.slots[~hidden]] = True
    used[0] = True  # the null row: finite
    case.entries[~used] = torch.nan
    assert torch.equal(case.run(form), expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_huge_logit_does_not_overflow(form: AttentionKernel) -> None:
    """The maximum is taken over window, entries and sink."""
    case = Case(8, 64)
    case.queries *= 1e3
    assert case.run(form).isfinite().all()
    case.queries /= 1e3
    case.sink += 1e3
    assert case.run(form).isfinite().all()


@pytest.mark.parametrize("form", FORMS)
def test_rows_come_from_ring_or_chunk(form: AttentionKernel) -> None:
    """Source s: ring[s], or chunk[-1 - s] below zero."""
    case = Case(1, 50)
    rows = form.gather(case.ring, case.chunk, case.sources.view(-1))
    for row, source in zip(rows, case.sources.view(-1).tolist(), strict=True):
        assert torch.equal(row, case.ring[source] if source >= 0 else case.chunk[-1 - source])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "width"), [(8, 64), (3, 50)])
def test_heads_are_normed_weighed_and_rotated(form: AttentionKernel, heads: int, width: int) -> None:
    """The latent vector is one head more, with a weight of its own; it may be a slice of a wider product."""
    case = Case(heads, width)
    query, wide = noise(N, heads * width, seed=8), noise(N, width + 7, seed=9)
    norms = 1 + 0.2 * noise(heads + 1, width, seed=10)
    queries, keys = form.heads(query, wide[:, 7:], norms, case.inverse, 1e-6)

    both = torch.cat((query, wide[:, 7:]), 1).view(N, heads + 1, width).double()
    both = both * (both.square().mean(2, keepdim=True) + 1e-6).rsqrt() * norms.double()
    tail = torch.view_as_complex(both[..., -8:].unflatten(2, (4, 2)).contiguous())
    angle = torch.complex(case.inverse.cos[..., ::2].double(), case.inverse.sin[..., 1::2].double())
    both[..., -8:] = torch.view_as_real(tail * angle).flatten(2)
    assert torch.allclose(queries.double(), both[:, :heads], atol=1e-5)
    assert torch.allclose(keys.double(), both[:, heads], atol=1e-5)
    parts = [
        form.heads(query[t : t + 1], wide[t : t + 1, 7:], norms, case.inverse.rows(slice(t, t + 1)), 1e-6)
        for t in range(N)
    ]
    assert torch.equal(torch.cat([part[0] for part in parts]), queries)
    assert torch.equal(torch.cat([part[1] for part in parts]), keys)


def test_the_form_follows_device_and_dtype() -> None:
    """One decision, when the model is built."""
    assert isinstance(bind(torch.device("cpu"), torch.float32), CpuAttention)
    assert isinstance(bind(torch.device("cpu"), torch.bfloat16), TorchAttention)
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(bind(torch.device("cuda"), dtype), TritonAttention)
