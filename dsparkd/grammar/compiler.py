"""From a grammar's canonical text to XGrammar's compiled form, and back from a stored body."""

from __future__ import annotations

import re

import xgrammar

from dsparkd.errors import GrammarError
from dsparkd.grammar.compile import compile_grammar
from dsparkd.grammar.vocabulary import Vocabularies, Vocabulary
from dsparkd.messages import Grammar

MAX_MESSAGE_CHARACTERS = 500

# "[12:34:56] /project/cpp/file.cc:123: " in front of what the library says.
_PLACE = re.compile(r"\[\d\d:\d\d:\d\d\]|\S*/\S*\.(?:cc|cpp|h|hpp|py):\d+:?")
_PATH = re.compile(r"(?:/[\w.+-]+){2,}|/")


def tokenizer_info(vocabulary: Vocabulary) -> xgrammar.TokenizerInfo:
    """XGrammar's form of a vocabulary; 0.7 s for 129,280 ids."""
    return xgrammar.TokenizerInfo(
        list(vocabulary.entries),
        xgrammar.VocabType.RAW,
        vocab_size=vocabulary.vocab_size,
        stop_token_ids=list(vocabulary.stop_ids),
    )


class Compiler:
    """Compiles for one tokenizer; any thread may call, and several at once. `info`: the ordinary view of the tokens."""

    def __init__(self, vocabularies: Vocabularies, num_threads: int) -> None:
        self.info = tokenizer_info(vocabularies.plain)
        self._tools_info = tokenizer_info(vocabularies.tools)
        self._num_threads = num_threads

    def compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        """Compile; takes as long as the grammar makes it. Raises GrammarError for one that XGrammar refuses.

        MemoryError: the process' memory did not suffice, which says nothing about the grammar.
        """
        # Within one compile XGrammar's own cache shares the masks of rules that are alike: 40 properties take 0.3 s
        # with it and 2 s without. Across compiles it would be a second owner of grammars, so it goes with its compiler,
        # which costs 10 us to make.
        compiler = xgrammar.GrammarCompiler(self._info_for(grammar), max_threads=self._num_threads, cache_enabled=True)
        try:
            return compile_grammar(compiler, grammar)
        except RuntimeError as error:
            if "bad_alloc" in str(error):
                raise MemoryError("XGrammar ran out of memory") from error
            raise GrammarError(describe(str(error)), code="invalid_grammar") from error
        except UnicodeDecodeError as error:
            # XGrammar quotes what it refuses and cuts the quotation between two bytes, so its message cannot be read.
            raise GrammarError(describe(""), code="invalid_grammar") from error

    def load(self, grammar: Grammar, body: bytes) -> xgrammar.CompiledGrammar:
        """Return what was serialized. XGrammar finds only some damage: the body's checksum must have been right.

        Raises RuntimeError for a body that it does refuse.
        """
        return xgrammar.CompiledGrammar.deserialize_json(body.decode(), self._info_for(grammar))

    def _info_for(self, grammar: Grammar) -> xgrammar.TokenizerInfo:
        return self._tools_info if grammar.kind == "tool_calls" else self.info


def describe(text: str) -> str:
    """What the library says, without its places and paths, at most MAX_MESSAGE_CHARACTERS."""
    plain = " ".join(_PATH.sub(" ", _PLACE.sub(" ", text)).split())
    return plain[:MAX_MESSAGE_CHARACTERS] or "the compiler gives no reason"
