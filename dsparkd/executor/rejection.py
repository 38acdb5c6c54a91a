"""Acceptance by rejection for a step's windows: gathers what it needs of drafter and target, and hands out ids.

Letters: N windows, K drafts of the widest one, V vocabulary, S rows that may be drawn from, G drafts of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dsparkd.executor.accept import Block, NoiseKeys, accept_rejection, one_hot, probabilities
from dsparkd.executor.draft import Blocks
from dsparkd.executor.sampler import GREEDY_TEMPERATURE, Pick, SampleRow
from dsparkd.executor.upload import upload, upload_ids
from dsparkd.executor.verify import Asked, Drafted


def picker(blocks: Blocks, drafts: Sequence[Drafted], asked: Asked) -> Pick:
    """Return what chooses the ids of a step that drafts: of each window its accepted drafts, then the last id.

    Rows behind a window's last id get id 0. A window's ids differ from its drafts first at the last id, or end with
    the row that may be read last, so the coupled rule finds the same length in them.
    """

    def pick(probs: Tensor) -> Tensor:
        """probs [S, V] -> ids [S]. No host sync."""
        windows = [index for index, readable in enumerate(asked.readable) if readable]
        if not windows:
            return torch.zeros(0, dtype=torch.int64, device=probs.device)
        readable = [asked.readable[index] for index in windows]
        firsts = _firsts(readable)
        heads = [asked.samples[first] for first in firsts]
        chosen = [drafts[index] for index in windows]
        most = max(map(len, chosen), default=0)
        device = probs.device
        columns = np.arange(most + 1)
        starts, usable = np.array(firsts), np.array(readable)
        # Columns behind a window's last row repeat it; nothing reads them.
        places = starts[:, None] + np.minimum(columns, usable[:, None] - 1)  # [N, K+1]
        padded = np.array([ids + (0,) * (most - len(ids)) for ids in chosen], np.int64).reshape(len(windows), most)
        block = Block(upload(padded, device), upload_ids([len(ids) for ids in chosen], device), upload(usable, device))
        logits = blocks.drafts.logits.index_select(0, upload_ids(windows, device))[:, :most]
        believed = _draft_probs(logits, block.draft_ids, heads)
        accepted = accept_rejection(block, believed, probs[upload(places, device)], _keys(heads, device))
        window, column = np.nonzero(columns < usable[:, None])
        own = accepted.ids.view(-1).index_select(0, upload(window * (most + 1) + column, device))
        ids = torch.zeros(probs.shape[0], dtype=torch.int64, device=device)
        return ids.index_copy_(0, upload(places[window, column], device), own.clamp(min=0))

    return pick


def _firsts(readable: Sequence[int]) -> list[int]:
    """Index of each window's first row among all rows."""
    firsts, at = [], 0
    for count in readable:
        firsts.append(at)
        at += count
    return firsts


def _draft_probs(logits: Tensor, ids: Tensor, heads: Sequence[SampleRow]) -> Tensor:
    """What drafts were drawn from: logits [N, K, V], ids [N, K] -> [N, K, V]."""
    temperatures = upload(np.array([head.sampling.temperature for head in heads], np.float32), logits.device)
    greedy = temperatures <= GREEDY_TEMPERATURE
    drawn = probabilities(logits / torch.where(greedy, 1.0, temperatures)[:, None, None])
    return torch.where(greedy[:, None, None], one_hot(ids, logits.shape[2]), drawn)


def _keys(heads: Sequence[SampleRow], device: torch.device) -> NoiseKeys:
    """Noise keys of windows whose first rows are heads; an anchor stands before what its row chooses."""
    keys = np.array([(head.sampling.seed, head.sampling.choice, head.position - 1) for head in heads], np.int64)
    seeds, choices, positions = upload(keys.reshape(-1, 3), device).unbind(dim=1)
    return NoiseKeys(seeds, choices, positions)
