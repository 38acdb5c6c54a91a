"""Every struct that crosses a process, with its decoders.

    parent  -> rank          ToRank          RoutedBatch, Abort, Shutdown
    rank    -> parent        FromRank        Progress, RankReady, StartFailed, Admitted, Refused, MetricsFrame,
                                             CrashReport, Farewell
    rank    -> detokenizer   ToDetokenizer   TokenDeltas, Farewell
    detok.  -> parent        FromDetokenizer Progress, StartFailed, TextDeltas, Farewell
    rank    -> probe         ToProbe         ProbeRequest
    probe   -> rank          FromProbe       ProbeReady, ProbeVerdict, ProbeBody

Times are CLOCK_MONOTONIC nanoseconds, comparable between the processes of one host.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What crosses a process boundary: frozen, and an unknown field is an error."""


MAX_TOP_LOGPROBS = 20  # alternatives beside a token; the rank holds memory for as many


class SamplingParams(Message, frozen=True, kw_only=True):
    """How one choice is sampled. Every value is already validated by the parent.

    seed and choice key the Gumbel noise (decisions.md 3), so a choice's text does not depend on its neighbours.
    temperature 0 is greedy. top_k 0 and top_p 1 are off. top_logprobs None means no logprobs at all, 0 means the
    chosen token's only. prompt_logprobs asks for those of the prompt too (completions `echo`), and bypasses the
    prefix cache.
    """

    max_tokens: int
    seed: int
    choice: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: bool = False


GrammarKind = Literal["json_schema", "regex", "ebnf", "choice", "structural_tag", "tool_calls"]


class Grammar(Message, frozen=True, kw_only=True):
    """What a request's text must match; equal ones share one compiled grammar.

    text: canonical, and what is compiled: a schema or structural tag in canonical JSON, a regular expression written
    anew, the bytes of an EBNF text, a JSON list of the choices. "tool_calls" is a structural tag that names markers.
    max_whitespace: most white space in a row between JSON tokens; 0: no limit. any_whitespace false: one fixed layout.
    """

    kind: GrammarKind
    text: str
    any_whitespace: bool = True
    max_whitespace: int = 32


class TokenizedRequest(Message, frozen=True, kw_only=True):
    """One item of an API batch: one prompt, one choice.

    starts_in_reasoning: the prompt opens the reasoning, so a grammar begins behind its end.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    skip_special_tokens: bool = True
    starts_in_reasoning: bool = False
    received_ns: int
    encoded_ns: int
    tokenized_ns: int
    dispatched_ns: int


class RoutedBatch(Message, frozen=True, tag=True):
    """Requests that enter one rank's queue together or not at all. `frame` counts from 1 per rank.

    grammar: what the answer of each of them must match; one API request has one.
    """

    dp_rank: int
    frame: int
    requests: tuple[TokenizedRequest, ...]
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if not self.requests:
            raise ValueError("RoutedBatch carries no request")


class Abort(Message, frozen=True, tag=True):
    """The client left; exact id, never a prefix. Unknown ids are ignored (the request may just have ended)."""

    request_id: str


class Shutdown(Message, frozen=True, tag=True):
    """Abort what is left, then leave the loop at an agreed tick."""


class Progress(Message, frozen=True, tag=True):
    """A start-up stage of a rank, for the log and for the service manager's extended time-out."""

    dp_rank: int
    stage: str
    done: int
    total: int


class PathState(Message, frozen=True):
    """One optional path of the server and why it is (not) in use."""

    path: str
    state: Literal["active", "off", "impossible"]
    why: str


class RankReady(Message, frozen=True, tag=True, kw_only=True):
    """A rank is warm. Bytes are what its pools really hold, and its graphs. graph_tiers: in tokens."""

    dp_rank: int
    device: str
    weight_bytes: int
    kv_bytes: dict[str, int]
    num_pages: int
    num_snapshots: int
    longest_tick_s: float
    gc_frozen_objects: int
    graph_bytes: dict[str, int] = {}
    graph_tiers: tuple[int, ...] = ()
    paths: tuple[PathState, ...]


class StartFailed(Message, frozen=True, tag=True):
    """A rank or the detokenizer cannot start; `exit_code` is the one that its process leaves with."""

    role: str
    exit_code: int
    error: str


class Admitted(Message, frozen=True, tag=True):
    """The request is in the rank's queue, its grammar at hand; from here on it ends through the detokenizer."""

    request_id: str
    delivered_ns: int


class Refused(Message, frozen=True, tag=True):
    """The request was never queued; answers instead of Admitted."""

    request_id: str
    status: int
    code: str
    param: str | None
    message: str
    retry_after_s: int | None = None


class LoadSnapshot(Message, frozen=True, kw_only=True):
    """What the router and health may know of a rank; published from its tick thread only, on the load board.

    `frame` is the last RoutedBatch taken in; outstanding counts cover requests that have not ended, tokens are
    their uncomputed prompt tokens plus one per row that decodes.
    """

    dp_rank: int
    sequence: int
    published_ns: int
    frame: int
    tick: int
    parked: bool
    outstanding_requests: int
    outstanding_tokens: int
    waiting_requests: int


class MetricsFrame(Message, frozen=True, tag=True):
    """Cumulative values of one process; the key is (family, label values joined by NUL). Latest frame wins.

    `values` holds counters and gauges; `histograms` holds (count per bucket edge ..., sum) in metrics.py's order.
    """

    source: str
    values: dict[str, float]
    histograms: dict[str, tuple[float, ...]]


class CrashReport(Message, frozen=True, tag=True):
    """What a failing rank knows of its end; the last thing that it sends.

    cause: one line. is_consequence: another process' end or failure brought it about, as far as this rank can tell.
    report: a JSON object.
    """

    dp_rank: int
    cause: str
    is_consequence: bool
    report: bytes


class Farewell(Message, frozen=True, tag=True):
    """The sender has sent everything that it will ever send."""

    source: str


class TokenLogprob(Message, frozen=True):
    """Log-probability of one emitted (or prompt) id and of the most likely alternatives, best first."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


class DetokenizeOptions(Message, frozen=True):
    """What the detokenizer must know of a request; rides on its first delta."""

    stop_strings: tuple[str, ...]
    skip_special_tokens: bool


class Finish(Message, frozen=True, kw_only=True):
    """How and why a request ended.

    reason "stop" by a stop string: `cut_bytes` trailing bytes of the output's text are the stop string (and what
    follows it inside the last token) and are not shown. matched is the stop id or string. error only with "error";
    code and status are then what the client gets, None and 500 for a failure without a code of its own.
    """

    reason: FinishReason
    matched: int | str | None = None
    cut_bytes: int = 0
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    error: str | None = None
    code: str | None = None
    status: int = 500


class TokenDelta(Message, frozen=True, kw_only=True):
    """New ids of one request, in order. `options` on the first delta, `finish` on the last."""

    request_id: str
    token_ids: tuple[int, ...]
    options: DetokenizeOptions | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish: Finish | None = None


class TokenDeltas(Message, frozen=True, tag=True):
    """All deltas of one tick of a rank."""

    dp_rank: int
    deltas: tuple[TokenDelta, ...]


class TextLogprob(Message, frozen=True):
    """TokenLogprob with its text; `raw` are the token's own bytes."""

    token_id: int
    token: str
    raw: bytes
    logprob: float | None
    top: tuple[tuple[int, str, bytes, float], ...] = ()


class TextDelta(Message, frozen=True, kw_only=True):
    """New text of one request: whole characters only, stop strings held back; may be empty."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TextLogprob, ...] | None = None
    prompt_logprobs: tuple[TextLogprob, ...] | None = None
    finish: Finish | None = None


class TextDeltas(Message, frozen=True, tag=True):
    """All deltas of one wake-up of the detokenizer."""

    deltas: tuple[TextDelta, ...]


class ProbeRequest(Message, frozen=True, tag=True, kw_only=True):
    """Try a grammar in a process that may die. `number` is the sender's; answers carry it back.

    digest: the grammar's name in the store. bytes_per_s: how fast the sender loads stored bodies, 0 for unknown.
    """

    number: int
    digest: str
    grammar: Grammar
    bytes_per_s: float


class ProbeReady(Message, frozen=True, tag=True):
    """Probes may come. bytes_per_s: how fast this machine loads a stored body, in processor time."""

    bytes_per_s: float


class ProbeVerdict(Message, frozen=True, tag=True, kw_only=True):
    """What became of a probe: sound, refused for what it is, or not decided because the machine was too busy.

    compile_ns: processor time. compiled_bytes: XGrammar's own count. cpu_s and num_bytes: the limit that was broken.
    """

    number: int
    state: Literal["sound", "refused", "busy"]
    compile_ns: int = 0
    compiled_bytes: int = 0
    code: str = ""
    message: str = ""
    cpu_s: int = 0
    num_bytes: int = 0


class ProbeBody(Message, frozen=True, tag=True):
    """What became of the serialized form of a sound grammar, after its verdict; there may be no such message."""

    number: int
    decision: Literal["serialized", "local_faster", "body_too_large", "not_serialized"]


ToProbe = ProbeRequest
FromProbe = ProbeReady | ProbeVerdict | ProbeBody
ToRank = RoutedBatch | Abort | Shutdown
FromRank = Progress | RankReady | StartFailed | Admitted | Refused | MetricsFrame | CrashReport | Farewell
ToDetokenizer = TokenDeltas | Farewell
FromDetokenizer = StartFailed | Progress | TextDeltas | Farewell

encode = msgspec.msgpack.Encoder().encode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
decode_to_detokenizer = msgspec.msgpack.Decoder(ToDetokenizer).decode
decode_from_detokenizer = msgspec.msgpack.Decoder(FromDetokenizer).decode
decode_to_probe = msgspec.msgpack.Decoder(ToProbe).decode
decode_from_probe = msgspec.msgpack.Decoder(FromProbe).decode
