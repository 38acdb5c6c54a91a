"""The compiled cpu kernels; cpu.h says what each computes."""

from typing import Protocol

class _Pointers(Protocol):
    def cast(self, kind: str, address: int) -> object: ...
    def new(self, kind: str, values: list[object]) -> object: ...

class _Library(Protocol):
    def dsparkd_multiply(self, x: object, w: object, num_rows: int, inner: int, outer: int, out: object) -> None: ...
    def dsparkd_collapse(
        self,
        streams: object,
        raw: object,
        scale: object,
        base: object,
        norm: object,
        num_tokens: int,
        num_streams: int,
        width: int,
        iterations: int,
        eps: float,
        norm_eps: float,
        input: object,
        post: object,
        comb: object,
    ) -> None: ...
    def dsparkd_expand(
        self,
        output: object,
        streams: object,
        post: object,
        comb: object,
        num_tokens: int,
        num_streams: int,
        width: int,
        next: object,
    ) -> None: ...
    def dsparkd_experts(
        self,
        x: object,
        expert_ids: object,
        shares: object,
        num_rows: int,
        width: int,
        top_k: int,
        first: int,
        count: int,
        w13: object,
        w2: object,
        expert_width: int,
        limit: float,
        total: object,
    ) -> int: ...
    def dsparkd_gather(
        self, ring: object, chunk: object, sources: object, num_rows: int, width: int, rows: object
    ) -> None: ...
    def dsparkd_heads(
        self,
        query: object,
        latent: object,
        latent_stride: int,
        norms: object,
        cosines: object,
        sines: object,
        num_tokens: int,
        num_heads: int,
        width: int,
        rotary_width: int,
        eps: float,
        queries: object,
        keys: object,
    ) -> None: ...
    def dsparkd_attend(
        self,
        queries: object,
        ring: object,
        chunk: object,
        sources: object,
        first: object,
        window: int,
        entries: object,
        slots: object,
        slots_stride: int,
        counts: object,
        sink: object,
        cosines: object,
        sines: object,
        num_tokens: int,
        num_heads: int,
        width: int,
        rotary_width: int,
        output: object,
    ) -> int: ...
    def dsparkd_choose(
        self,
        queries: object,
        weights: object,
        keys: object,
        slots: object,
        slots_stride: int,
        rows: object,
        counts: object,
        num_tokens: int,
        num_heads: int,
        width: int,
        top_k: int,
        chosen: object,
        chosen_stride: int,
    ) -> int: ...

ffi: _Pointers
lib: _Library
