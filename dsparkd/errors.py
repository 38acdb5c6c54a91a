"""The whole exception hierarchy; a class names the blast radius of what went wrong.

Start: `ConfigError`, `CapabilityError`: nothing listens, exit 78, which systemd does not restart.
Request: `RequestError`: one request or one API batch fails with a status and a code.
Pair: `FatalError`: both ranks stop, exit 70, and the service manager restarts the whole.
"""

EXIT_OK = 0
EXIT_FATAL = 70  # EX_SOFTWARE
EXIT_CONFIG = 78  # EX_CONFIG; RestartPreventExitStatus in systemd/dsparkd.service


class DsparkdError(Exception):
    """Everything that this project raises on purpose."""

    exit_code = EXIT_FATAL


class StartError(DsparkdError):
    """The server does not start."""

    exit_code = EXIT_CONFIG


class ConfigError(StartError):
    """A configuration key is wrong: names it, what was found (None: it is not set) and what to write instead."""

    def __init__(self, key: str, found: object, remedy: str) -> None:
        super().__init__(f"{key} is not set: {remedy}" if found is None else f"{key} = {found!r}: {remedy}")
        self.key = key
        self.remedy = remedy


class CapabilityError(StartError):
    """A path that is switched on cannot work here: names the setting, what is missing and the remedy."""

    def __init__(self, feature: str, missing: str, remedy: str) -> None:
        super().__init__(f"{feature}: missing {missing}; {remedy}")
        self.feature = feature
        self.missing = missing
        self.remedy = remedy


class CheckpointError(StartError):
    """A checkpoint file or tensor is missing, left over, mis-shaped or mis-typed: names it."""


class RequestError(DsparkdError):
    """One request fails with an HTTP status and an OpenAI error object."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str = "invalid_value",
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s


class GrammarError(RequestError):
    """A request's grammar is malformed, beyond a limit, or cannot be enforced; param: a JSON pointer into the body."""


class FatalError(DsparkdError):
    """Both ranks stop; requests in flight get a readable error."""


class PeerError(FatalError):
    """The other end of a channel or of the rank exchange failed, left or fell silent."""


class ExchangeError(PeerError):
    """The native exchange failed: its code, and the channel and sequence number of the call, None outside of one."""

    def __init__(self, message: str, *, code: str, channel: int | None, sequence: int | None) -> None:
        super().__init__(message)
        self.code = code
        self.channel = channel
        self.sequence = sequence


class BoardError(DsparkdError):
    """The load board cannot be read: whoever wants to know how a rank is takes it for unwell."""


class ExchangeStopped(DsparkdError):
    """The parent ended a rank's wait for the other one: an order to leave, above the loop no error."""


class InvariantError(FatalError):
    """Something that must hold did not: a bug in this program, never a client's doing."""
