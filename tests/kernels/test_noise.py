"""The noise against a scalar Philox, the generator's published vectors, golden values and its own distribution."""

from __future__ import annotations

import math

import pytest
import torch

from dsparkd.kernels import noise

# Known-answer vectors of the Random123 distribution for philox4x32, 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

# (seed, choice, position, id) -> r and G; every implementation must reproduce r exactly.
GOLDEN = [
    ((0, 0, 0, 0), 0x6627E8D5, 0.6748403906822205),
    ((0, 0, 0, 3), 0x9B00DBD8, 0.07247371971607208),
    ((1234567890123456789, 0, 17, 4095), 0xF0110A75, -1.021283745765686),
    ((2**63 - 1, 3, 2**20, 129279), 0x7F228995, 0.3762781620025635),
]


def scalar_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 as the paper writes it, on Python integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & 0xFFFFFFFF, (p0 >> 32) ^ c3 ^ k1, p0 & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def scalar_word(seed: int, choice: int, position: int, token_id: int) -> int:
    """One word of the layout that noise.py documents."""
    return scalar_philox((token_id // 4, position, choice, 0), (seed & 0xFFFFFFFF, seed >> 32))[token_id % 4]


def rows(keys: list[tuple[int, int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn (seed, choice, position) triples into the three row tensors."""
    seeds, choices, positions = zip(*keys, strict=True)
    return torch.tensor(seeds), torch.tensor(choices), torch.tensor(positions)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_gives_the_published_vectors(
    counter: tuple[int, ...], key: tuple[int, ...], output: tuple[int, ...]
) -> None:
    """A generator that is not Philox would still look random; only the authors' vectors tell."""
    got = noise.philox(torch.tensor(counter).unbind(), torch.tensor(key).unbind())

    assert tuple(got.tolist()) == output
    assert scalar_philox(counter, key) == output


def test_words_equal_the_scalar_generator_for_every_key_part() -> None:
    """Seed, choice, position and id each reach the counter or key, also beyond 32 bits of seed and a multiple of 4."""
    keys = [(0, 0, 0), (5, 0, 0), (5, 1, 0), (5, 0, 1), (2**63 - 1, 7, 2**20), (1 << 40, 0, 31), (1 << 31, 0, 31)]

    words = noise.random_words(*rows(keys), 4099)

    assert words.shape == (len(keys), 4099)
    for row, key in enumerate(keys):
        for token_id in (0, 1, 2, 3, 4, 5, 1023, 4095, 4096, 4098):
            assert int(words[row, token_id]) == scalar_word(*key, token_id)


def test_each_stream_is_the_generator_under_another_counter() -> None:
    """Acceptance by rejection is only exact if what tests a draft is not what drew it."""
    streams = (noise.SAMPLING, noise.ACCEPTANCE, noise.REPLACEMENT, noise.DRAFTS, noise.DRAFTS + 1)
    words = [noise.random_words(*rows([(9, 2, 31)]), 8, stream)[0].tolist() for stream in streams]

    for stream, got in zip(streams, words, strict=True):
        assert tuple(got[:4]) == scalar_philox((0, 31, 2, stream), (9, 0))
    assert len({tuple(got) for got in words}) == len(streams)


@pytest.mark.parametrize(("key", "word", "value"), GOLDEN)
def test_golden_values_hold(key: tuple[int, int, int, int], word: int, value: float) -> None:
    """A seeded text must survive a release: these numbers may never change."""
    seed, choice, position, token_id = key

    words = noise.random_words(*rows([(seed, choice, position)]), token_id + 1)

    assert int(words[0, token_id]) == word
    assert float(noise.gumbel_of_words(words)[0, token_id]) == pytest.approx(value, rel=1e-6)


def test_noise_keeps_full_precision_where_it_is_large_and_is_always_finite() -> None:
    """Draws are won in the tail near v = 0; at the other end a rounded v of 1 would make the noise infinite."""
    words = torch.tensor([0, 1, 2, 1000, 1 << 16, 1 << 31, 2**32 - 129, 2**32 - 128, 2**32 - 1])

    got = noise.gumbel_of_words(words).tolist()

    for word, value in zip(words.tolist(), got, strict=True):
        v = (word + 0.5) * 2.0**-32
        exact = -math.log(-math.log1p(-v))
        # Above one half float32 holds v with fewer digits of 1 - v; the noise is small and negative there.
        assert value == pytest.approx(exact, rel=3e-7 if word <= 1 << 31 else 0.2)
        assert math.isfinite(value)
    assert got == sorted(got, reverse=True)


def test_noise_of_a_row_does_not_depend_on_its_neighbours() -> None:
    """Bits, not values: a row's draw must be the same alone and in any batch."""
    keys = [(1000 + i, i % 3, 17 * i) for i in range(33)]
    together = noise.gumbel(*rows(keys), 1003)

    for i in (0, 1, 16, 32):
        assert torch.equal(noise.gumbel(*rows(keys[i : i + 1]), 1003)[0], together[i])
    # A vocabulary's padding is no part of the key.
    assert torch.equal(noise.gumbel(*rows(keys), 515), together[:, :515])


def test_argmax_of_scores_plus_noise_samples_the_softmax() -> None:
    """The Gumbel-max property is why the noise exists: frequencies must be the probabilities."""
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    draws = 20000
    positions = torch.arange(draws)
    zeros = torch.zeros(draws, dtype=torch.int64)

    ids = (probabilities.log() + noise.gumbel(zeros + 99, zeros, positions, 4)).argmax(dim=-1)

    frequencies = torch.bincount(ids, minlength=4) / draws
    # Four standard deviations of the largest share: 4 * sqrt(0.25 / 20000).
    assert torch.allclose(frequencies, probabilities, atol=0.015)


@pytest.mark.gpu
def test_words_on_the_device_equal_those_on_the_cpu() -> None:
    """A seeded request gives the same text wherever it runs only if the words are the same."""
    keys = rows([(2**62 + 12345, 1, 999), (7, 0, 3)])

    on_device = noise.random_words(*(part.cuda() for part in keys), 129280)

    assert torch.equal(on_device.cpu(), noise.random_words(*keys, 129280))
