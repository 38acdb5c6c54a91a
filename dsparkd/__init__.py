"""dsparkd: serves DeepSeek-V4 checkpoints on two co-located data-parallel ranks."""

__version__ = "0.1.0"
