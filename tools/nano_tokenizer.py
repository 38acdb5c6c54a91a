"""Train the nano checkpoints' tokenizer: byte-level BPE, cut and marked as DeepSeek-V4's, with a small vocabulary.

The corpus is the language reference that ships inside Python, so nothing is downloaded, and the same minor version of
Python gives the same file anywhere.
"""

from __future__ import annotations

from pydoc_data import topics

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 6016  # a multiple of 64

# Skipped when text is decoded; the first three have ids 0, 1, 2.
FIRST_SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
NOISE_TOKEN = "<｜place▁holder▁no▁799｜>"

# Kept when text is decoded: the parser of model output reads them.
MARKERS = (
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<|EOT|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁outputs▁begin｜>",
    "<｜tool▁outputs▁end｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
    "<｜tool▁sep｜>",
    "<think>",
    "</think>",
    "｜DSML｜",
    "<｜begin▁sys｜>",
    "<｜end▁sys｜>",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜read_url｜>",
)

# The three isolating splits of the released pre-tokenizer, in order.
SPLITS = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def train_tokenizer() -> Tokenizer:
    """Return a trained tokenizer of VOCAB_SIZE ids, added tokens included."""
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(MARKERS) - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in FIRST_SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics.topics[name] for name in sorted(topics.topics)), trainer)
    tokenizer.add_special_tokens([AddedToken(NOISE_TOKEN, special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=True) for text in MARKERS])
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the corpus gave {tokenizer.get_vocab_size()} tokens instead of {VOCAB_SIZE}")
    return tokenizer
