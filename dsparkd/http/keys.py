"""API keys: read once at start, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import stat
from pathlib import Path

from dsparkd.config import ServerConfig
from dsparkd.errors import ConfigError


class ApiKeys:
    """Digests of the accepted keys; without any, every client is welcome."""

    def __init__(self, digests: tuple[bytes, ...]) -> None:
        self._digests = digests

    @classmethod
    def load(cls, config: ServerConfig) -> ApiKeys:
        """Read server.api_keys_file: one key a line. Raises ConfigError unless only its owner may read it."""
        if not config.api_keys_file:
            return cls(())
        path = Path(config.api_keys_file)
        try:
            mode = stat.S_IMODE(path.stat().st_mode)
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            remedy = f'cannot be read ({reason}); write one key a line into it, or set it to "" to need none'
            raise ConfigError("server.api_keys_file", str(path), remedy) from error
        if mode & 0o077:
            raise ConfigError("server.api_keys_file", str(path), f"has mode {mode:04o}; run chmod 600 on it")
        keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not keys:
            raise ConfigError("server.api_keys_file", str(path), "holds no key; write one a line")
        return cls(tuple(hashlib.sha256(key.encode()).digest() for key in keys))

    def accept(self, authorization: str) -> bool:
        """Whether a request with this Authorization header may pass. Takes the same time for every wrong key."""
        if not self._digests:
            return True
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode(errors="surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)
