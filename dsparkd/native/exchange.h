/* Lock-step exchange of two ranks through one shared mapping: ABI 2. exchange.c holds the layout and the protocol.
 * Functions return a code and never print, abort or leave errno as their result; dsx_message has the text of the
 * calling thread's last failure. A handle belongs to the process that attached it, and to one thread at a time. */
#ifndef DSPARKD_NATIVE_EXCHANGE_H
#define DSPARKD_NATIVE_EXCHANGE_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
    DSX_OK = 0,
    DSX_ARG,           /* a pointer, number or handle that cannot be */
    DSX_ABI,           /* the region is not one of this library, or of another session */
    DSX_DIGEST,        /* the region belongs to another configuration */
    DSX_OWNED,         /* the rank has, or had, an owner */
    DSX_FORKED,        /* the handle was made by the parent of this process */
    DSX_BUSY,          /* another thread is inside the handle */
    DSX_SEQ_LOCAL,     /* this rank's own slot was overwritten */
    DSX_SEQ_PEER,      /* the peer's slot holds a number that cannot come next */
    DSX_TIMEOUT,       /* the peer did not come */
    DSX_PEER_DEAD,     /* its process ended */
    DSX_PEER_REPLACED, /* its pid belongs to another process */
    DSX_PEER_LEFT,     /* it detached in order */
    DSX_PEER_ERROR,    /* the pair has failed before; names the first cause */
    DSX_CHANNEL,       /* the peer is in an exchange of another channel */
    DSX_TICK,          /* the ranks count different ticks */
    DSX_FUTEX,         /* the kernel refused to let this rank sleep */
    DSX_CLOCK,         /* there is no monotonic clock */
    DSX_STOPPED,       /* the parent ended the wait */
    DSX_LIVENESS       /* the kernel offers no pidfd, or no descriptor is left for one */
} dsx_code;

/* What one rank says in one exchange. */
typedef struct {
    int64_t field[7];
    int64_t extra[6];
    uint64_t intent;
} dsx_words;

/* Times of one exchange, in nanoseconds. later = the later of both arrivals. */
typedef struct {
    uint64_t sequence;
    uint64_t total_ns;        /* end - own arrival */
    uint64_t peer_wait_ns;    /* end - own publication */
    uint64_t arrival_skew_ns; /* |own arrival - peer's arrival| */
    uint64_t after_last_ns;   /* end - later */
    uint32_t sleeps;          /* futex waits */
    uint32_t wakes;           /* futex wakes of the peer */
} dsx_stats;

/* What a handle's exchanges leave, each only if it ended with DSX_OK: the peer's words of the last one, and the times of
 * each channel's last one. */
typedef struct {
    dsx_words peer;
    dsx_stats stats[2];
} dsx_outcome;

/* One word or line of the region, for a test that compares the layout with its description. */
typedef struct {
    const char *name;
    size_t offset;
    size_t bytes;
} dsx_place;

typedef struct dsx_handle dsx_handle;

uint32_t dsx_abi(void);
size_t dsx_region_bytes(void);

/* All places of the region; num_places may not be null. */
const dsx_place *dsx_layout(size_t *num_places);

/* Write the header of a fresh region; fd: a file of dsx_region_bytes() zero bytes. */
dsx_code dsx_init(int fd, uint64_t session, uint64_t digest);

/* Become a rank of a region. fd may be closed afterwards. *handle lives until the process ends. */
dsx_code dsx_attach(int fd, int rank, uint64_t session, uint64_t digest, uint64_t timeout_ns, uint64_t spin_ns,
                    dsx_handle **handle);

/* Change how long the exchanges from now on wait for the peer. */
dsx_code dsx_set_timeout(dsx_handle *handle, uint64_t timeout_ns);

/* Where a handle's exchanges leave what they bring; lives as long as the handle. NULL for no handle. */
const dsx_outcome *dsx_outcome_of(const dsx_handle *handle);

/* Meet the peer in the next exchange of a channel (0 plan, 1 tier). own: a dsx_words; void, so that cffi hands on
 * a caller's bytes as they lie. */
dsx_code dsx_exchange(dsx_handle *handle, int channel, const void *own);

/* Parking. Both ranks sleep outside this library after a plan exchange in which they agreed to; a kick ends the peer's
 * park of that exchange and no later one. Its descriptor is written by the caller, after dsx_kick. */
dsx_code dsx_park(dsx_handle *handle);
dsx_code dsx_kick(dsx_handle *handle);
dsx_code dsx_take_kick(dsx_handle *handle, int *kicked);

/* End every wait in a region with DSX_STOPPED, for good; from any process that holds its descriptor. */
dsx_code dsx_stop(int fd);

/* Leave the region; a peer that waits is told. Calling it again does nothing. */
dsx_code dsx_detach(dsx_handle *handle);

/* Text of the last failure of the calling thread in a call with this handle, or with none; cut to len - 1 bytes. */
dsx_code dsx_message(const dsx_handle *handle, char *text, size_t len);

#endif
