"""Process main of the probe process: tries new grammars for both ranks, so that none of them can take a rank along."""

from __future__ import annotations

from pathlib import Path

from dsparkd.config import Config
from dsparkd.grammar import probe
from dsparkd.grammar.store import scope_name
from dsparkd.grammar.vocabulary import make_vocabularies
from dsparkd.ipc.wiring import ProbeWiring
from dsparkd.model.config import load_model_config
from dsparkd.text.tokenizer import Tokenizer


def main(config: Config, wiring: ProbeWiring) -> int:
    """Run until both ranks have closed their ends; returns the exit code."""
    checkpoint = Path(config.engine.checkpoint)
    model = load_model_config(checkpoint)
    vocabularies = make_vocabularies(Tokenizer.load(checkpoint), model.vocab_size, (model.eos_token_id,))
    limits = config.grammar.store
    directory = Path(limits.directory) / scope_name(vocabularies.scope()) if limits.enabled else None
    return probe.serve(config.grammar, vocabularies, directory, wiring.ranks)
