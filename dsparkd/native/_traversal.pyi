"""The compiled traversal; traversal.h says what each call does."""

from typing import Protocol

class Pointer(Protocol):
    def __getitem__(self, index: int) -> int: ...

class Handles(Protocol):
    def __getitem__(self, index: int) -> object: ...

class _Pointers(Protocol):
    def cast(self, kind: str, address: int) -> object: ...
    def new(self, kind: str, values: dict[str, object] | None = None) -> Struct: ...
    def string(self, text: object) -> bytes: ...

class Struct(Protocol):
    num_matchers: int
    num_trees: int
    commits_only: int
    deadline_ns: int

    def __getitem__(self, index: int) -> int: ...

class _Library(Protocol):
    DSPARKD_WALKED: int
    DSPARKD_ENDED: int
    DSPARKD_LATE: int
    DSPARKD_COMMIT_REFUSED: int
    DSPARKD_MATCHER_FAILED: int
    DSPARKD_NO_TOKEN: int
    DSPARKD_BAD_HANDLE: int
    DSPARKD_REPEATED_HANDLE: int
    DSPARKD_NOT_A_TREE: int
    DSPARKD_STUCK: int
    DSPARKD_OK: int
    DSPARKD_OTHER_VERSION: int
    DSPARKD_NO_RESOURCES: int
    DSPARKD_FORKED: int
    DSPARKD_BUSY: int
    DSPARKD_BAD_BATCH: int
    DSPARKD_UNSEEN: int
    DSPARKD_USABLE: int
    DSPARKD_REFUSED: int
    DSPARKD_MESSAGE_BYTES: int

    def dsparkd_traversal_versions(self, built: Struct, loaded: Struct) -> None: ...
    def dsparkd_traversal_open(self, methods: Struct, num_threads: int, out: Struct) -> int: ...
    def dsparkd_traversal_close(self, pool: object) -> None: ...
    def dsparkd_traversal_walk(self, pool: object, walk: Struct) -> int: ...
    def dsparkd_traversal_stuck(self, pool: object, longest_ns: Struct) -> int: ...

ffi: _Pointers
lib: _Library
