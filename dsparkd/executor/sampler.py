"""Sampler: logits to token ids and log-probabilities, row by row.

A row's token is a pure function of its logits, its parameters, its history and its noise key: every operation here is
elementwise or reduces one row, so neighbours cannot move a bit. The order of the rules is penalties, logit_bias, the
grammar's mask, min_tokens, ids without a token, temperature, top_k, top_p, min_p; then argmax(score + noise), or the
plain argmax at temperature 0. Log-probabilities are the model's own, read before any of these.

Letters: R logit rows, V vocabulary, K alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dsparkd.errors import InvariantError
from dsparkd.executor.masks import allowed_ids
from dsparkd.executor.upload import upload, upload_ids
from dsparkd.kernels import noise, sampling
from dsparkd.messages import MAX_TOP_LOGPROBS, SamplingParams, TokenLogprob

# Up to here a draw is the argmax in all but name, and scores divided by less would leave float32.
GREEDY_TEMPERATURE = 1e-5
# A penalty near 0 multiplies a score out of float32; an infinite one could not be told from a broken model's.
MAX_SCORE = 1e30
_ZERO = np.float32(0)
# Rows of prompt log-probabilities looked at together: their int64 keys take 8 bytes a vocabulary id.
PROMPT_ROWS = 256


# From what each sample would be drawn from, [R, V] float32, to an id for each, [R] int64.
Pick = Callable[[Tensor], Tensor]


class SampleRow(NamedTuple):
    """One token to choose: from row `logits_row`, to stand at `position` of the sequence, after the given history.

    mask_row: the row of masks that holds the choice; None: no mask. keeps_on: the text may not end with this token.
    follows: which id of the step before stands behind output_ids, and only the device knows it; None: none does.
    """

    logits_row: int
    sampling: SamplingParams
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    position: int
    mask_row: int | None = None
    keeps_on: bool = False
    follows: int | None = None

    @property
    def num_outputs(self) -> int:
        """Ids that the text has so far."""
        return len(self.output_ids) + (self.follows is not None)


class PromptRow(NamedTuple):
    """Prompt tokens whose log-probability is read: next_ids[i] from row `first_row` + i, with `top` alternatives."""

    first_row: int
    next_ids: tuple[int, ...]
    top: int


@dataclass(frozen=True, slots=True)
class Choices:
    """Aligned with the rows asked for; `logprobs` holds None where a row wants none."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    prompt_logprobs: tuple[tuple[TokenLogprob, ...], ...]


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was chosen, still on the device: values [K] float64 hold it all, ids [S] int64 the samples' alone.

    read: makes Choices of values, on the host.

    read raises InvariantError when a row has no finite winner.
    """

    values: Tensor
    ids: Tensor
    read: Callable[[list[float]], Choices]


def most_values(num_samples: int, num_prompt_tokens: int) -> int:
    """Most `Drawn.values` of a step: all samples and prompt tokens with as many alternatives as may be asked for."""
    listed = 1 + 2 * MAX_TOP_LOGPROBS
    return num_samples * (listed + 2) + num_prompt_tokens * listed


class Sampler:
    """Stateless between steps; owned by the rank's tick thread.

    has_token: for every id of the (padded) vocabulary, whether the tokenizer has a token for it; the others are never
    sampled and never listed as alternatives. eos_ids end a text, so min_tokens holds them back too.
    """

    def __init__(self, has_token: Sequence[bool], eos_ids: tuple[int, ...], device: torch.device) -> None:
        self._eos_ids = eos_ids
        self._device = device
        self._num_tokens = sum(has_token)
        penalty = [0.0 if known else -math.inf for known in has_token]
        # None where every id is a token: nothing to add then.
        self._no_token = None if all(has_token) else torch.tensor(penalty, dtype=torch.float32, device=device)

    def choose(
        self,
        logits: Tensor,
        samples: Sequence[SampleRow],
        prompts: Sequence[PromptRow] = (),
        words: Tensor | None = None,
        pick: Pick | None = None,
    ) -> Choices:
        """Choose and wait for it: `draw` and what it gives, for who has nothing else to do. Arguments as for `draw`."""
        drawn = self.draw(logits, samples, prompts, words, pick)
        return drawn.read(drawn.values.tolist())

    def draw(
        self,
        logits: Tensor,
        samples: Sequence[SampleRow],
        prompts: Sequence[PromptRow] = (),
        words: Tensor | None = None,
        pick: Pick | None = None,
        before: Tensor | None = None,
    ) -> Drawn:
        """Choose a token for each sample and read the prompts' log-probabilities. No host sync.

        logits [R, V] float32; the call may overwrite them. words [M, V / 32 rounded up] int32 on their device: the
        masks that samples name. pick: chooses in place of the draw. before [S'] int64 on their device: the ids that
        samples follow.
        """
        rows = [sample.logits_row for sample in samples]
        parts = [self._read_prompt(logits, prompt) for prompt in prompts]
        wanted = [i for i, sample in enumerate(samples) if sample.sampling.top_logprobs is not None]
        # A copy, because what follows edits the rows in place.
        raw = logits.index_select(0, self._ids([rows[i] for i in wanted])) if wanted else logits[:0]
        if rows != list(range(logits.shape[0])):
            logits = logits.index_select(0, self._ids(rows))
        if pick is None:
            best, ids = self._choose(logits, samples, words, before)
        else:
            best, ids = self._pick(logits, samples, words, pick)
        top = max((samples[i].sampling.top_logprobs or 0 for i in wanted), default=0)
        parts += [self._logprobs(raw, ids.index_select(0, self._ids(wanted)), top)] if wanted else []
        parts += [best.double(), ids.double()]
        values = torch.cat([part.reshape(-1) for part in parts])
        return Drawn(values, ids, lambda host: self._unpack(host, samples, prompts, wanted, top))

    def distributions(self, logits: Tensor, samples: Sequence[SampleRow], words: Tensor | None = None) -> Tensor:
        """What `choose` would draw each sample from: [R, V] float32, all on one id where it is greedy. No host sync.

        Arguments as for `choose`, but row i of logits is that of samples[i]. For acceptance by rejection.
        """
        self._apply_rules(logits, samples, words)
        drawn = [i for i, sample in enumerate(samples) if sample.sampling.temperature > GREEDY_TEMPERATURE]
        best, ids = sampling.best(logits)
        # What is not finite must stay visible.
        probs = torch.zeros_like(logits).scatter_(1, ids[:, None], (1.0 + 0.0 * best)[:, None])
        if drawn:
            rows = self._ids(drawn)
            scores = self._scores(logits.index_select(0, rows), [samples[i].sampling for i in drawn])
            probs.index_copy_(0, rows, scores.softmax(dim=-1))
        return probs

    def _pick(
        self, logits: Tensor, samples: Sequence[SampleRow], words: Tensor | None, pick: Pick
    ) -> tuple[Tensor, Tensor]:
        """Let `pick` choose; a row's best is the chance of what was chosen, NaN where the row is."""
        probs = self.distributions(logits, samples, words)
        ids = pick(probs)
        return probs.gather(1, ids[:, None]).squeeze(1), ids

    def _apply_rules(
        self, logits: Tensor, samples: Sequence[SampleRow], words: Tensor | None, before: Tensor | None = None
    ) -> None:
        """Edit logits [R, V], contiguous, in place by all that comes before temperature; each rule in all its rows."""
        self._penalize(logits, samples, before)
        self._mask(logits, samples, words)
        self._hold_back_ends(logits, samples)
        if self._no_token is not None:
            logits += self._no_token

    def _choose(
        self, logits: Tensor, samples: Sequence[SampleRow], words: Tensor | None, before: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return each row's winning score [R] float32 and id [R] int64; edits logits."""
        self._apply_rules(logits, samples, words, before)
        drawn = [i for i, sample in enumerate(samples) if sample.sampling.temperature > GREEDY_TEMPERATURE]
        if not drawn:
            return sampling.best(logits)
        if len(drawn) == len(samples):
            return sampling.best(self._noisy(logits, samples))
        best, ids = sampling.best(logits)
        rows = self._ids(drawn)
        noisy_best, noisy_ids = sampling.best(self._noisy(logits.index_select(0, rows), [samples[i] for i in drawn]))
        return best.index_copy_(0, rows, noisy_best), ids.index_copy_(0, rows, noisy_ids)

    def _penalize(self, logits: Tensor, samples: Sequence[SampleRow], before: Tensor | None) -> None:
        """Apply penalties and biases; places are flat.

        Within each rule places are distinct, but for an id that a sample follows: where the host knew that id already,
        its place comes twice with the same number. Each rule reads all its scores first, so it is edited once.
        """
        flat, vocab = logits.view(-1), logits.shape[1]
        repeated, counted, biased = _Places(vocab), _Places(vocab), _Places(vocab)
        counted_behind: list[tuple[int, SampleRow]] = []
        for i, sample in enumerate(samples):
            params = sample.sampling
            if params.repetition_penalty != 1.0:
                seen = {*sample.prompt_ids, *sample.output_ids}
                factor = np.float32(params.repetition_penalty)
                repeated.add(i, np.fromiter(seen, np.int64, len(seen)), factor)
                if sample.follows is not None:
                    repeated.add_behind(i, sample.follows, factor)
            counts = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
            if counts and sample.follows is not None:
                counted_behind.append((i, sample))
            elif counts and sample.output_ids:
                ids, times = np.unique(np.array(sample.output_ids, np.int64), return_counts=True)
                by_count = times.astype(np.float32) * np.float32(params.frequency_penalty)
                counted.add(i, ids, by_count + np.float32(params.presence_penalty))
            if params.logit_bias:
                bias_ids, biases = zip(*params.logit_bias, strict=True)
                biased.add(i, np.array(bias_ids, np.int64), np.array(biases, np.float32))
        if repeated.places:
            index, factors = repeated.upload(self._device, before)
            scores = flat.index_select(0, index)
            scores = torch.where(scores > 0, scores / factors, scores * factors).clamp_(-MAX_SCORE, MAX_SCORE)
            flat.index_copy_(0, index, scores)
        if counted.places:
            index, penalties = counted.upload(self._device)
            flat.index_copy_(0, index, flat.index_select(0, index) - penalties)
        if counted_behind:
            index, penalties = self._count_behind(counted_behind, _known(before), vocab)
            flat.index_copy_(0, index, flat.index_select(0, index) - penalties)
        if biased.places:
            index, added = biased.upload(self._device)
            flat.index_copy_(0, index, flat.index_select(0, index) + added)

    def _count_behind(
        self, samples: Sequence[tuple[int, SampleRow]], before: Tensor, vocab_size: int
    ) -> tuple[Tensor, Tensor]:
        """Places and penalties by count of rows whose last id only the device knows; samples with their rows.

        The arithmetic is that of rows whose ids the host knows, operation by operation, so it has the same bits.
        """
        known = [np.unique(np.array(sample.output_ids, np.int64), return_counts=True) for _, sample in samples]
        rows = upload(np.array([(row, sample.follows) for row, sample in samples], np.int64), self._device)
        weights = [(each.sampling.frequency_penalty, each.sampling.presence_penalty) for _, each in samples]
        by_row = upload(np.array(weights, np.float32), self._device)
        lens = [len(ids) for ids, _ in known]
        owner = upload(np.repeat(np.arange(len(samples)), lens), self._device)
        ids = upload(np.concatenate([ids for ids, _ in known]), self._device)
        times = upload(np.concatenate([count for _, count in known]).astype(np.float32), self._device)
        last = before.index_select(0, rows[:, 1])  # [n]
        is_last = ids == last.index_select(0, owner)
        # Small whole numbers: exact in any order.
        own = torch.ones_like(by_row[:, 0]).index_add_(0, owner, times * is_last)
        owner = torch.cat((owner, torch.arange(len(samples), device=self._device)))
        counts = torch.cat((times + is_last, own))
        penalties = counts * by_row[:, 0].index_select(0, owner) + by_row[:, 1].index_select(0, owner)
        return torch.cat((ids, last)) + rows[:, 0].index_select(0, owner) * vocab_size, penalties

    def _mask(self, logits: Tensor, samples: Sequence[SampleRow], words: Tensor | None) -> None:
        """Take what the grammars forbid out of their rows; touches no other row."""
        held = [(i, sample.mask_row) for i, sample in enumerate(samples) if sample.mask_row is not None]
        if not held:
            return
        if words is None:
            raise InvariantError(f"{len(held)} rows with a grammar, and no masks")
        rows, mask_rows = zip(*held, strict=True)
        allowed = allowed_ids(words.index_select(0, self._ids(mask_rows)), logits.shape[1])
        index = self._ids(rows)
        logits.index_copy_(0, index, logits.index_select(0, index).masked_fill_(~allowed, -math.inf))

    def _hold_back_ends(self, logits: Tensor, samples: Sequence[SampleRow]) -> None:
        """Let texts go on: below min_tokens, and before a grammar begins.

        Where a grammar allows nothing but the end, the end stays (D-26). No host sync.
        """
        vocab = logits.shape[1]
        free, held = _Places(vocab), _Places(vocab)
        held_rows: list[int] = []
        for i, sample in enumerate(samples):
            ends = self._held_back(sample)
            if ends and sample.mask_row is None:
                free.add(i, np.array(ends, np.int64))
            elif ends:
                held.add(len(held_rows), np.array(ends, np.int64))
                held_rows.append(i)
        if free.places:
            logits.view(-1).index_fill_(0, free.index(self._device), -math.inf)
        if held_rows:
            rows = self._ids(held_rows)
            whole = logits.index_select(0, rows)
            without = whole.clone()
            without.view(-1).index_fill_(0, held.index(self._device), -math.inf)
            goes_on = without.isfinite().any(dim=1, keepdim=True)
            logits.index_copy_(0, rows, torch.where(goes_on, without, whole))

    def _held_back(self, sample: SampleRow) -> tuple[int, ...]:
        """Ids that would end a text that has to go on."""
        params = sample.sampling
        ends: tuple[int, ...] = ()
        if sample.num_outputs < params.min_tokens:
            ends = params.stop_ids if params.ignore_eos else (*params.stop_ids, *self._eos_ids)
        return (*ends, *self._eos_ids) if sample.keeps_on else ends

    def _noisy(self, logits: Tensor, samples: Sequence[SampleRow]) -> Tensor:
        """Return scores plus noise [R, V]; every row has a temperature above 0."""
        params = [sample.sampling for sample in samples]
        scores = self._scores(logits, params)
        keys = np.array([(p.seed, p.choice, s.position) for p, s in zip(params, samples, strict=True)], np.int64)
        seeds, choices, positions = upload(keys, self._device).unbind(dim=1)
        return scores.add_(noise.gumbel(seeds, choices, positions, scores.shape[1]))

    def _scores(self, logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
        """Return temperature-scaled, filtered scores [R, V]; every row has a temperature above 0."""
        temperatures = upload(np.array([p.temperature for p in params], np.float32), self._device)
        # log p up to the row's constant, which argmax does not see; the best score is 0 exactly.
        scores = logits.sub(logits.amax(dim=-1, keepdim=True)).div_(temperatures[:, None])
        self._filter(scores, params)
        return scores

    def _filter(self, scores: Tensor, params: Sequence[SamplingParams]) -> None:
        """Apply top_k, top_p and min_p in place, each to the rows that set it."""
        vocab = scores.shape[1]
        rows = [i for i, p in enumerate(params) if 0 < p.top_k < vocab]
        if rows:
            counts = [params[i].top_k for i in rows]
            num_kept = self._ids(counts)
            self._replace(scores, rows, lambda some: sampling.keep_top_k(some, num_kept, max(counts)))
        rows = [i for i, p in enumerate(params) if p.top_p < 1]
        if rows:
            top_p = self._doubles([params[i].top_p for i in rows])
            self._replace(scores, rows, lambda some: sampling.keep_top_p(some, top_p))
        rows = [i for i, p in enumerate(params) if p.min_p > 0]
        if rows:
            min_p = self._doubles([params[i].min_p for i in rows])
            self._replace(scores, rows, lambda some: sampling.keep_min_p(some, min_p))

    def _replace(self, scores: Tensor, rows: list[int], change: Callable[[Tensor], Tensor]) -> None:
        """Put what `change` makes of some rows in their place."""
        index = self._ids(rows)
        scores.index_copy_(0, index, change(scores.index_select(0, index)))

    def _read_prompt(self, logits: Tensor, prompt: PromptRow) -> Tensor:
        """Return the prompt's log-probabilities as `_logprobs` lays them out, a block of rows at a time."""
        blocks = []
        for start in range(0, len(prompt.next_ids), PROMPT_ROWS):
            ids = prompt.next_ids[start : start + PROMPT_ROWS]
            first = prompt.first_row + start
            blocks.append(self._logprobs(logits[first : first + len(ids)], self._ids(ids), prompt.top))
        return torch.cat(blocks) if blocks else torch.empty(0, 1 + 2 * prompt.top, device=self._device).double()

    def _logprobs(self, raw: Tensor, ids: Tensor, top: int) -> Tensor:
        """Return [R, 1 + 2K] float64: the log-probability of ids [R], then K alternatives' ids, then theirs.

        raw [R, V] float32 are unedited logits. The distribution is over the whole row, ids without a token included.
        """
        total = sampling.log_totals(raw)[:, None]
        own = raw.gather(1, ids[:, None]) - total
        if top == 0:
            return own.double()
        listed = raw if self._no_token is None else raw + self._no_token
        values, alternatives = sampling.stable_topk(listed, min(top, self._num_tokens))
        return torch.cat((own.double(), alternatives.double(), (values - total).double()), dim=1)

    def _unpack(
        self,
        host: list[float],
        samples: Sequence[SampleRow],
        prompts: Sequence[PromptRow],
        wanted: list[int],
        top: int,
    ) -> Choices:
        """Cut the step's one host copy into rows, in the order in which `choose` put them together."""
        count = len(samples)
        best, ids = host[len(host) - 2 * count : len(host) - count], [int(i) for i in host[len(host) - count :]]
        if not all(map(math.isfinite, best)):
            raise InvariantError(f"the logits of {sum(not math.isfinite(b) for b in best)} rows have no finite winner")
        at = 0
        read = []
        for prompt in prompts:
            width = 1 + 2 * min(prompt.top, self._num_tokens)
            read.append(
                tuple(
                    _token_logprob(token_id, host[at + i * width : at + (i + 1) * width], prompt.top)
                    for i, token_id in enumerate(prompt.next_ids)
                )
            )
            at += width * len(prompt.next_ids)
        width = 1 + 2 * min(top, self._num_tokens)
        logprobs: list[TokenLogprob | None] = [None] * count
        for i in wanted:
            logprobs[i] = _token_logprob(ids[i], host[at : at + width], samples[i].sampling.top_logprobs or 0)
            at += width
        return Choices(tuple(ids), tuple(logprobs), tuple(read))

    def _ids(self, ids: Collection[int]) -> Tensor:
        return upload_ids(ids, self._device)

    def _doubles(self, values: Sequence[float]) -> Tensor:
        return upload(np.array(values, np.float64), self._device)


class _Places:
    """Places in logits [R, V] laid flat, and a number for each."""

    def __init__(self, vocab_size: int) -> None:
        self.places: list[NDArray[np.int64]] = []
        self._numbers: list[NDArray[np.float32]] = []
        self._behind: list[tuple[int, int]] = []
        self._numbers_behind: list[np.float32] = []
        self._vocab_size = vocab_size

    def add(self, row: int, ids: NDArray[np.int64], numbers: NDArray[np.float32] | np.float32 = _ZERO) -> None:
        """Take ids of one row, with a number each or one for all."""
        self.places.append(ids + row * self._vocab_size)
        self._numbers.append(np.broadcast_to(numbers, ids.shape))

    def add_behind(self, row: int, follows: int, number: np.float32) -> None:
        """Take the id of one row that only the device knows, with its number; the row has other ids, too."""
        self._behind.append((row * self._vocab_size, follows))
        self._numbers_behind.append(number)

    def index(self, device: torch.device) -> Tensor:
        """The places that the host knows, int64."""
        return upload(np.concatenate(self.places), device)

    def upload(self, device: torch.device, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """All places, and their numbers, float32; before: the ids that `add_behind` names."""
        numbers = upload(np.concatenate([*self._numbers, np.array(self._numbers_behind, np.float32)]), device)
        if not self._behind:
            return self.index(device), numbers
        firsts, follows = upload(np.array(self._behind, np.int64), device).unbind(dim=1)
        return torch.cat((self.index(device), firsts + _known(before).index_select(0, follows))), numbers


def _known(before: Tensor | None) -> Tensor:
    if before is None:
        raise InvariantError("samples that follow the ids of a step, and no ids")
    return before


def _token_logprob(token_id: int, cells: list[float], top: int) -> TokenLogprob:
    """Read one row of `Sampler._logprobs`; of its K alternatives the first `top` were asked for."""
    num_listed = len(cells) // 2
    alternatives = zip(cells[1 : 1 + min(top, num_listed)], cells[1 + num_listed :], strict=False)
    return TokenLogprob(token_id, cells[0], tuple((int(i), logprob) for i, logprob in alternatives))
