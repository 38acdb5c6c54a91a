/* Two ranks meet in a shared mapping: each publishes a numbered slot and reads the peer's slot of the same number.
 *
 * A slot's number is stored after its payload and read before it. Two slots a channel are enough: a rank writes slot
 * s & 1 for s + 2 only after it saw the peer's s + 1, which the peer stores only after it has copied out slot s.
 * A rank that waits spins for a while and then sleeps on its bell; who publishes rings it only when it is told to.
 * Atomics that decide whether somebody sleeps are sequentially consistent, all others acquire or release. */
#define _GNU_SOURCE
#include "exchange.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAGIC UINT64_C(0x32586b7261707364) /* "dsparkX2", read as a little-endian integer */
#define NANOSECONDS UINT64_C(1000000000)

enum {
    ABI = 2,
    LAYOUT = 1,
    NUM_RANKS = 2,
    NUM_CHANNELS = 2,
    NUM_SLOTS = 2,
    NUM_FIELDS = 7,
    NUM_EXTRA = 6,
    LINE_BYTES = 64,
    REGION_BYTES = 1536,
    PLAN = 0,
    TICK_WORD = 2,             /* of the plan channel's extra words */
    TAG = 0x64737830,          /* a channel's tag is TAG + channel: zero memory has none */
    INTENTS = 3,               /* STOP, MAY_PARK */
    LOOK_TURNS = 64,           /* turns of a spin between two looks at the clock and at everything else */
    ERROR_SEQ_TURNS = 1 << 20, /* the word beside an error follows it within nanoseconds unless its writer died */
    NOT_YET = -1,              /* beside the codes: keep waiting */
};
#define LIVENESS_NS (NANOSECONDS / 10)

typedef enum { EMPTY, ATTACHED, LEAVING, LEFT, FAILED } owner_state;

struct header {
    uint64_t magic;
    uint32_t abi, layout, num_ranks, num_channels, num_slots, num_fields, region_bytes, line_bytes;
    uint64_t session, config_digest;
};

struct shared {
    _Atomic uint64_t error; /* code in the low half, rank in the high one: one compare-and-swap decides who was first */
    _Atomic uint64_t error_seq;
    _Atomic uint32_t stop;
};

struct wait_line {
    _Atomic uint32_t bell;    /* futex word */
    _Atomic uint32_t waiting; /* its owner sleeps or is about to */
    _Atomic uint32_t parked;
    _Atomic uint32_t kick; /* which plan exchange's park the peer has ended, see kick_of; 0: none */
};

struct owner_line {
    _Atomic uint32_t state, pid;
    _Atomic uint64_t start_ticks, attach_ns;
    _Atomic uint32_t attempts;
};

struct slot {
    _Atomic uint64_t seq;
    int64_t field[NUM_FIELDS];
};

struct side {
    uint64_t arrival_ns;
    uint32_t intent, channel_tag;
    int64_t extra[NUM_EXTRA];
};

struct channel {
    _Alignas(LINE_BYTES) struct slot slot[NUM_SLOTS];
    _Alignas(LINE_BYTES) struct side side[NUM_SLOTS];
};

struct rank_area {
    _Alignas(LINE_BYTES) struct wait_line wait;
    _Alignas(LINE_BYTES) struct owner_line owner;
    struct channel channel[NUM_CHANNELS];
};

struct region {
    _Alignas(LINE_BYTES) struct header header;
    _Alignas(LINE_BYTES) struct shared shared;
    /* The prefetcher fetches lines in pairs: rank 0's first line does not lie beside the shared words. */
    _Alignas(2 * LINE_BYTES) unsigned char unused[2 * LINE_BYTES];
    struct rank_area rank[NUM_RANKS];
};

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "all integers of the region are little-endian");
_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "a lock would live in one process only");
_Static_assert(sizeof(_Atomic uint32_t) == 4 && sizeof(_Atomic uint64_t) == 8, "atomics are their integers");
_Static_assert(sizeof(struct slot) == LINE_BYTES && sizeof(struct side) == LINE_BYTES, "a slot is one line");
_Static_assert(sizeof(((dsx_outcome *)NULL)->stats) == NUM_CHANNELS * sizeof(dsx_stats), "one for each channel");
_Static_assert(sizeof(dsx_words) == sizeof(int64_t) * (NUM_FIELDS + NUM_EXTRA + 1), "exchange.py packs it");
_Static_assert(sizeof(struct channel) == 256 && sizeof(struct rank_area) == 640, "a rank's lines are its own");
_Static_assert(offsetof(struct region, shared) == 0x040 && offsetof(struct region, unused) == 0x080, "layout 1");
_Static_assert(offsetof(struct region, rank) == 0x100 && sizeof(struct region) == REGION_BYTES, "layout 1");
_Static_assert(offsetof(struct rank_area, owner) == 0x040 && offsetof(struct rank_area, channel) == 0x080, "layout 1");
_Static_assert(offsetof(struct region, rank) % 128 == 0 && sizeof(struct rank_area) % 128 == 0,
               "no line of one rank shares a pair with a line of the other");

/* A handle is a page of its own that a fork wipes: a child finds zeros, without a system call. */
struct dsx_handle {
    _Atomic uint32_t life;
    _Atomic uint32_t busy;
    struct region *region;
    uint32_t rank;
    int pidfd; /* of the peer; -1 until it has been seen attached */
    uint64_t timeout_ns, spin_ns;
    uint64_t check_ns; /* when to see again whether the peer lives */
    uint64_t sequence[NUM_CHANNELS];
    dsx_outcome outcome;
};

enum { WIPED = 0, LIVE = 0x65766c69, DETACHED = 0x64616564 };

static const char *const CODE_NAMES[] = {
    "OK",         "ARG",  "ABI",   "DIGEST", "OWNED",   "FORKED",    "BUSY",          "SEQ_LOCAL", "SEQ_PEER",
    "TIMEOUT",    "PEER_DEAD",     "PEER_REPLACED",     "PEER_LEFT", "PEER_ERROR",    "CHANNEL",   "TICK",
    "FUTEX",      "CLOCK", "STOPPED", "LIVENESS",
};
static const char *const CHANNEL_NAMES[NUM_CHANNELS] = {"plan", "tier"};

static _Thread_local struct {
    const dsx_handle *handle;
    char text[192];
} last_failure;

__attribute__((format(printf, 3, 4))) static dsx_code fail(const dsx_handle *handle, dsx_code code, const char *format,
                                                           ...)
{
    va_list arguments;

    va_start(arguments, format);
    (void)vsnprintf(last_failure.text, sizeof last_failure.text, format, arguments);
    va_end(arguments);
    last_failure.handle = handle;
    return code;
}

static dsx_code bad_argument(const dsx_handle *handle, const char *name)
{
    return fail(handle, DSX_ARG, "dsx: invalid argument %s", name);
}

static dsx_code bad_region(const char *field, uint64_t found, uint64_t expected)
{
    return fail(NULL, DSX_ABI, "dsx: region has %s 0x%" PRIx64 ", expected 0x%" PRIx64, field, found, expected);
}

static bool read_clock(uint64_t *now_ns)
{
    struct timespec now;

    if (clock_gettime(CLOCK_MONOTONIC, &now) != 0)
        return false;
    *now_ns = (uint64_t)now.tv_sec * NANOSECONDS + (uint64_t)now.tv_nsec;
    return true;
}

/* Field 22 of /proc/PID/stat: with the pid it names one process for the life of the machine. */
static bool read_start_ticks(uint32_t pid, uint64_t *ticks)
{
    char path[32], text[1024];
    const char *field;
    ssize_t length;
    int fd;

    (void)snprintf(path, sizeof path, "/proc/%" PRIu32 "/stat", pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    length = read(fd, text, sizeof text - 1);
    (void)close(fd);
    if (length <= 0)
        return false;
    text[length] = '\0';
    field = strrchr(text, ')'); /* a program's name may hold blanks and brackets; nothing behind it does */
    for (int number = 2; field != NULL && number < 22; number++)
        field = strchr(field + 1, ' ');
    if (field == NULL)
        return false;
    *ticks = strtoull(field + 1, NULL, 10);
    return true;
}

static int open_pidfd(uint32_t pid)
{
    return (int)syscall(SYS_pidfd_open, (pid_t)pid, 0U);
}

static void pause_briefly(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The file behind fd, mapped; NULL after noting why not. */
static struct region *map_file(int fd, dsx_code *code)
{
    struct stat file;
    void *memory;

    if (fstat(fd, &file) != 0) {
        *code = bad_argument(NULL, "fd");
        return NULL;
    }
    if (!S_ISREG(file.st_mode)) {
        *code = bad_region("file_type", file.st_mode & S_IFMT, S_IFREG);
        return NULL;
    }
    if (file.st_size != REGION_BYTES) {
        *code = bad_region("file_bytes", (uint64_t)file.st_size, REGION_BYTES);
        return NULL;
    }
    memory = mmap(NULL, REGION_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        *code = bad_argument(NULL, "fd");
        return NULL;
    }
    *code = DSX_OK;
    return memory;
}

/* Nobody can resize the file under the mapping: an anonymous one is sealed, a named one is its owner's alone. */
static dsx_code check_file(int fd)
{
    const int wanted = F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL;
    struct stat file;
    int seals;

    if (fstat(fd, &file) != 0)
        return bad_argument(NULL, "fd");
    if (S_ISREG(file.st_mode) && file.st_nlink == 0) {
        seals = fcntl(fd, F_GET_SEALS);
        if (seals < 0 || (seals & wanted) != wanted)
            return bad_region("seals", seals < 0 ? 0 : (uint64_t)seals, (uint64_t)wanted);
    } else if (S_ISREG(file.st_mode) && (file.st_uid != geteuid() || (file.st_mode & 077) != 0)) {
        return bad_region("file_mode", file.st_mode & 0777, 0600);
    }
    return DSX_OK;
}

static dsx_code check_header(const struct header *header)
{
    const struct {
        const char *name;
        uint64_t found, expected;
    } words[] = {
        {"magic", header->magic, MAGIC},
        {"abi", header->abi, ABI},
        {"layout", header->layout, LAYOUT},
        {"num_ranks", header->num_ranks, NUM_RANKS},
        {"num_channels", header->num_channels, NUM_CHANNELS},
        {"num_slots", header->num_slots, NUM_SLOTS},
        {"num_fields", header->num_fields, NUM_FIELDS},
        {"region_bytes", header->region_bytes, REGION_BYTES},
        {"line_bytes", header->line_bytes, LINE_BYTES},
    };

    for (size_t index = 0; index < sizeof words / sizeof words[0]; index++)
        if (words[index].found != words[index].expected)
            return bad_region(words[index].name, words[index].found, words[index].expected);
    return DSX_OK;
}

static void wake(_Atomic uint32_t *bell, int count)
{
    (void)syscall(SYS_futex, bell, FUTEX_WAKE, count, NULL, NULL, 0);
}

/* Make every sleep on a rank's bell end, also one that is about to begin. */
static void ring(struct rank_area *rank)
{
    /* Pairs with the load of bell in wait_asleep: either the sleeper has read this value, or its wait is refused. */
    atomic_fetch_add(&rank->wait.bell, 1);
    wake(&rank->wait.bell, INT_MAX);
}

static struct rank_area *own_area(const dsx_handle *handle)
{
    return &handle->region->rank[handle->rank];
}

static struct rank_area *peer_area(const dsx_handle *handle)
{
    return &handle->region->rank[1 - handle->rank];
}

/* Take the handle for one call. A wiped one is a parent's: its region is not even looked at. */
static dsx_code enter(dsx_handle *handle)
{
    const uint32_t life = handle == NULL ? DETACHED : atomic_load_explicit(&handle->life, memory_order_relaxed);

    if (handle != NULL && life == WIPED)
        return fail(handle, DSX_FORKED, "dsx: handle crossed a fork");
    if (life != LIVE)
        return bad_argument(handle, "handle");
    /* Pairs with the release in leave: what the last call's thread wrote is this one's. */
    if (atomic_exchange_explicit(&handle->busy, 1, memory_order_acquire) != 0)
        return fail(handle, DSX_BUSY, "dsx: two threads in one handle");
    return DSX_OK;
}

static dsx_code leave(dsx_handle *handle, dsx_code code)
{
    atomic_store_explicit(&handle->busy, 0, memory_order_release); /* pairs with enter */
    return code;
}

/* Make a failure the pair's, unless it has one, and let both ranks hear of it. */
static void publish_failure(dsx_handle *handle, dsx_code code, uint64_t sequence)
{
    struct shared *shared = &handle->region->shared;
    uint64_t none = 0;

    /* Pairs with failed_before: the number follows its code, so a reader may have to wait for it. */
    if (atomic_compare_exchange_strong(&shared->error, &none, (uint64_t)handle->rank << 32 | (uint32_t)code)) {
        atomic_store(&shared->error_seq, sequence);
        atomic_store(&own_area(handle)->owner.state, FAILED);
    }
    ring(own_area(handle));
    ring(peer_area(handle));
}

/* DSX_PEER_ERROR with the pair's first failure, or DSX_OK. */
static dsx_code failed_before(const dsx_handle *handle)
{
    struct shared *shared = &handle->region->shared;
    const uint64_t error = atomic_load(&shared->error); /* pairs with publish_failure */
    const uint32_t code = (uint32_t)error;
    uint64_t sequence = 0;

    if (error == 0)
        return DSX_OK;
    for (int turn = 0; sequence == 0 && turn < ERROR_SEQ_TURNS; turn++)
        sequence = atomic_load(&shared->error_seq);
    return fail(handle, DSX_PEER_ERROR, "dsx: rank %" PRIu32 " reported %s at sequence %" PRIu64,
                (uint32_t)(error >> 32), code <= DSX_LIVENESS ? CODE_NAMES[code] : "an unknown code", sequence);
}

static dsx_code stopped(const dsx_handle *handle)
{
    return fail(handle, DSX_STOPPED, "dsx: stopped by the parent");
}

/* The last number that a rank has published on a channel. */
static uint64_t last_published(struct rank_area *rank, int channel)
{
    const uint64_t even = atomic_load(&rank->channel[channel].slot[0].seq);
    const uint64_t odd = atomic_load(&rank->channel[channel].slot[1].seq);

    return even > odd ? even : odd;
}

static uint64_t before(uint64_t sequence)
{
    return sequence > NUM_SLOTS ? sequence - NUM_SLOTS : 0;
}

static dsx_code bad_sequence(const dsx_handle *handle, dsx_code code, uint32_t rank, int channel, uint64_t expected,
                             uint64_t found)
{
    return fail(handle, code, "dsx: rank %" PRIu32 " expected sequence %" PRIu64 " on %s, found %" PRIu64, rank,
                expected, CHANNEL_NAMES[channel], found);
}

static dsx_code on_other_channel(const dsx_handle *handle, uint32_t tag, int channel)
{
    const uint32_t peer = 1 - handle->rank, other = tag - TAG;

    if (other < NUM_CHANNELS)
        return fail(handle, DSX_CHANNEL, "dsx: rank %" PRIu32 " is on channel %s, this rank on %s", peer,
                    CHANNEL_NAMES[other], CHANNEL_NAMES[channel]);
    return fail(handle, DSX_CHANNEL, "dsx: rank %" PRIu32 " is on channel 0x%" PRIx32 ", this rank on %s", peer, tag,
                CHANNEL_NAMES[channel]);
}

static dsx_code lost_peer(const dsx_handle *handle, dsx_code code, const char *how, uint64_t sequence)
{
    return fail(handle, code, "dsx: rank %" PRIu32 " (pid %" PRIu32 ") %s before sequence %" PRIu64, 1 - handle->rank,
                atomic_load(&peer_area(handle)->owner.pid), how, sequence);
}

/* Everything that can end a wait, the peer's arrival first: DSX_OK, a failure, or NOT_YET. */
static int look(const dsx_handle *handle, int channel, uint64_t sequence)
{
    struct rank_area *peer = peer_area(handle);
    /* Pairs with the store in publish. Sequentially consistent beside the store of waiting in wait_asleep. */
    _Atomic uint64_t *number = &peer->channel[channel].slot[sequence % NUM_SLOTS].seq;
    uint64_t seen = atomic_load(number);
    dsx_code code;

    if (seen == sequence)
        return DSX_OK;
    code = failed_before(handle);
    if (code != DSX_OK)
        return (int)code;
    if (seen != before(sequence))
        return (int)bad_sequence(handle, DSX_SEQ_PEER, 1 - handle->rank, channel, sequence, seen);
    if (atomic_load(&handle->region->shared.stop) != 0)
        return (int)stopped(handle);
    if (last_published(peer, 1 - channel) > handle->sequence[1 - channel])
        code = DSX_CHANNEL;
    else if (atomic_load(&peer->owner.state) == LEAVING || atomic_load(&peer->owner.state) == LEFT)
        code = DSX_PEER_LEFT;
    else
        return NOT_YET;
    /* What the peer did after this exchange does not undo it: its slot is older than what was just seen. */
    seen = atomic_load(number);
    if (seen == sequence)
        return DSX_OK;
    if (code == DSX_CHANNEL)
        return (int)on_other_channel(handle, (uint32_t)(TAG + 1 - channel), channel);
    return (int)lost_peer(handle, DSX_PEER_LEFT, "left", sequence);
}

/* Open a descriptor that tells the peer's end, and make sure that it is the process that attached. */
static dsx_code open_peer(dsx_handle *handle, uint32_t pid, uint64_t sequence)
{
    uint64_t ticks;

    handle->pidfd = open_pidfd(pid);
    if (handle->pidfd < 0) {
        if (errno == ESRCH)
            return lost_peer(handle, DSX_PEER_DEAD, "ended", sequence);
        return fail(handle, DSX_LIVENESS, "dsx: no pidfd (%s)", strerror(errno));
    }
    /* Read after the descriptor exists: if the pid names the right process now, it did so when it was opened. */
    if (!read_start_ticks(pid, &ticks))
        return lost_peer(handle, DSX_PEER_DEAD, "ended", sequence);
    if (ticks != atomic_load(&peer_area(handle)->owner.start_ticks))
        return lost_peer(handle, DSX_PEER_REPLACED, "was replaced", sequence);
    return DSX_OK;
}

/* DSX_OK while the peer lives or has not come yet. */
static dsx_code check_peer(dsx_handle *handle, uint64_t sequence)
{
    const uint32_t pid = atomic_load(&peer_area(handle)->owner.pid); /* pairs with attach: ticks are there before it */
    struct pollfd end = {.events = POLLIN};
    dsx_code code;

    if (pid == 0)
        return DSX_OK;
    if (handle->pidfd < 0) {
        code = open_peer(handle, pid, sequence);
        if (code != DSX_OK)
            return code;
    }
    end.fd = handle->pidfd;
    if (poll(&end, 1, 0) > 0)
        return lost_peer(handle, DSX_PEER_DEAD, "ended", sequence);
    return DSX_OK;
}

/* Sleep until the bell rings or the time is up; 0, or the number of an error that waiting again cannot mend. */
static int sleep_on(_Atomic uint32_t *bell, uint32_t seen, uint64_t until_ns)
{
    const struct timespec until = {
        .tv_sec = (time_t)(until_ns / NANOSECONDS),
        .tv_nsec = (long)(until_ns % NANOSECONDS),
    };

    if (syscall(SYS_futex, bell, FUTEX_WAIT_BITSET, seen, &until, NULL, FUTEX_BITSET_MATCH_ANY) == 0)
        return 0;
    return errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT ? 0 : errno;
}

static dsx_code no_clock(const dsx_handle *handle)
{
    return fail(handle, DSX_CLOCK, "dsx: clock failed");
}

static dsx_code too_late(const dsx_handle *handle, int channel, uint64_t sequence)
{
    return fail(handle, DSX_TIMEOUT,
                "dsx: rank %" PRIu32 " did not reach sequence %" PRIu64 " on %s within %" PRIu64
                " ms (it is at %" PRIu64 ")",
                1 - handle->rank, sequence, CHANNEL_NAMES[channel], handle->timeout_ns / 1000000,
                last_published(peer_area(handle), channel));
}

/* Look without giving up the core: DSX_OK, a failure, or NOT_YET when spin_ns are over. */
static int wait_awake(dsx_handle *handle, int channel, uint64_t sequence, uint64_t from_ns, uint64_t *now_ns)
{
    _Atomic uint64_t *number = &peer_area(handle)->channel[channel].slot[sequence % NUM_SLOTS].seq;
    int outcome;

    *now_ns = from_ns;
    while (*now_ns - from_ns < handle->spin_ns) {
        for (int turn = 0; turn < LOOK_TURNS; turn++) {
            /* Pairs with the store in publish: the payload is visible once its number is. */
            if (atomic_load_explicit(number, memory_order_acquire) == sequence)
                return DSX_OK;
            pause_briefly();
        }
        outcome = look(handle, channel, sequence);
        if (outcome != NOT_YET)
            return outcome;
        if (!read_clock(now_ns))
            return (int)no_clock(handle);
    }
    return look(handle, channel, sequence);
}

/* Sleep until the peer comes, something ends the wait, or the deadline passes. */
static dsx_code wait_asleep(dsx_handle *handle, int channel, uint64_t sequence, uint64_t now_ns, uint64_t deadline_ns,
                            uint32_t *sleeps)
{
    struct wait_line *own = &own_area(handle)->wait;
    uint32_t bell;
    dsx_code code;
    int outcome, error;

    for (;;) {
        if (now_ns >= handle->check_ns) { /* also before the first sleep of all */
            code = check_peer(handle, sequence);
            if (code != DSX_OK) { /* it may have published, or left in order, before it ended */
                outcome = look(handle, channel, sequence);
                return outcome == NOT_YET ? code : (dsx_code)outcome;
            }
            handle->check_ns = now_ns + LIVENESS_NS;
        }
        bell = atomic_load(&own->bell); /* pairs with ring and publish: a later ring changes it */
        /* Pairs with the load in publish: either the publisher sees the flag, or look sees its number. */
        atomic_store(&own->waiting, 1);
        outcome = look(handle, channel, sequence);
        if (outcome == NOT_YET) {
            error = sleep_on(&own->bell, bell, handle->check_ns < deadline_ns ? handle->check_ns : deadline_ns);
            ++*sleeps;
            outcome = look(handle, channel, sequence);
            if (outcome == NOT_YET && error != 0)
                outcome = (int)fail(handle, DSX_FUTEX, "dsx: futex wait failed (%d)", error);
        }
        atomic_store_explicit(&own->waiting, 0, memory_order_relaxed); /* a late wake of nobody is harmless */
        if (outcome != NOT_YET)
            return (dsx_code)outcome;
        if (!read_clock(&now_ns))
            return no_clock(handle);
        if (now_ns >= deadline_ns)
            return too_late(handle, channel, sequence);
    }
}

/* Write this rank's slot and wake the peer if it sleeps; returns the number of wakes. */
static uint32_t publish(dsx_handle *handle, int channel, uint64_t sequence, const int64_t *field,
                        const struct side *side)
{
    struct channel *lines = &own_area(handle)->channel[channel];
    struct wait_line *peer = &peer_area(handle)->wait;
    const size_t index = sequence % NUM_SLOTS;

    memcpy(lines->slot[index].field, field, sizeof lines->slot[index].field);
    lines->side[index] = *side;
    /* Releases the payload to the peer's loads of the number (wait_awake, look); sequentially consistent, so that it
     * comes before the load of waiting: a peer that does not see this number has raised its flag before that load. */
    atomic_store(&lines->slot[index].seq, sequence);
    handle->sequence[channel] = sequence;
    if (atomic_load(&peer->waiting) == 0)
        return 0;
    atomic_fetch_add(&peer->bell, 1); /* pairs with the load in wait_asleep */
    wake(&peer->bell, 1);
    return 1;
}

/* What the peer said in this exchange, once its slot holds the number. */
static void copy_out(const dsx_handle *handle, int channel, uint64_t sequence, dsx_words *peer)
{
    const struct channel *lines = &peer_area(handle)->channel[channel];
    const size_t index = sequence % NUM_SLOTS;

    memcpy(peer->field, lines->slot[index].field, sizeof peer->field);
    memcpy(peer->extra, lines->side[index].extra, sizeof peer->extra);
    peer->intent = lines->side[index].intent;
}

static dsx_code check_peers_words(const dsx_handle *handle, int channel, uint64_t sequence, const int64_t *extra)
{
    const struct side *side = &peer_area(handle)->channel[channel].side[sequence % NUM_SLOTS];

    if (side->channel_tag != (uint32_t)(TAG + channel))
        return on_other_channel(handle, side->channel_tag, channel);
    if (channel == PLAN && side->extra[TICK_WORD] != extra[TICK_WORD]) {
        const bool first = handle->rank == 0;
        return fail(handle, DSX_TICK, "dsx: ticks differ: %" PRId64 ", %" PRId64,
                    first ? extra[TICK_WORD] : side->extra[TICK_WORD],
                    first ? side->extra[TICK_WORD] : extra[TICK_WORD]);
    }
    return DSX_OK;
}

static dsx_code meet(dsx_handle *handle, int channel, uint64_t sequence, const dsx_words *own)
{
    struct side side = {.intent = (uint32_t)own->intent, .channel_tag = (uint32_t)(TAG + channel)};
    uint64_t published_ns, now_ns, end_ns, peer_ns, found;
    dsx_stats stats = {.sequence = sequence};
    dsx_code code;
    int outcome;

    if (!read_clock(&side.arrival_ns))
        return no_clock(handle);
    found = atomic_load_explicit(&own_area(handle)->channel[channel].slot[sequence % NUM_SLOTS].seq,
                                 memory_order_relaxed);
    if (found != before(sequence))
        return bad_sequence(handle, DSX_SEQ_LOCAL, handle->rank, channel, before(sequence), found);
    memcpy(side.extra, own->extra, sizeof side.extra);
    stats.wakes = publish(handle, channel, sequence, own->field, &side);
    if (!read_clock(&published_ns))
        return no_clock(handle);
    outcome = wait_awake(handle, channel, sequence, published_ns, &now_ns);
    if (outcome == NOT_YET)
        outcome = (int)wait_asleep(handle, channel, sequence, now_ns, side.arrival_ns + handle->timeout_ns,
                                   &stats.sleeps);
    if (outcome != DSX_OK)
        return (dsx_code)outcome;
    code = check_peers_words(handle, channel, sequence, own->extra);
    if (code != DSX_OK)
        return code;
    copy_out(handle, channel, sequence, &handle->outcome.peer);
    if (!read_clock(&end_ns))
        return no_clock(handle);
    peer_ns = peer_area(handle)->channel[channel].side[sequence % NUM_SLOTS].arrival_ns;
    if (end_ns < peer_ns) /* two cores' clocks may differ by some nanoseconds */
        end_ns = peer_ns;
    stats.total_ns = end_ns - side.arrival_ns;
    stats.peer_wait_ns = end_ns - published_ns;
    stats.arrival_skew_ns = peer_ns > side.arrival_ns ? peer_ns - side.arrival_ns : side.arrival_ns - peer_ns;
    stats.after_last_ns = end_ns - (peer_ns > side.arrival_ns ? peer_ns : side.arrival_ns);
    handle->outcome.stats[channel] = stats;
    return DSX_OK;
}

uint32_t dsx_abi(void)
{
    return ABI;
}

size_t dsx_region_bytes(void)
{
    return REGION_BYTES;
}

#define PLACE(type, member) {#member, offsetof(type, member), sizeof(((type *)NULL)->member)}
#define REGION_PLACE(member) PLACE(struct region, member)

const dsx_place *dsx_layout(size_t *num_places)
{
    static const dsx_place places[] = {
        REGION_PLACE(header),
        REGION_PLACE(header.magic),
        REGION_PLACE(header.abi),
        REGION_PLACE(header.layout),
        REGION_PLACE(header.num_ranks),
        REGION_PLACE(header.num_channels),
        REGION_PLACE(header.num_slots),
        REGION_PLACE(header.num_fields),
        REGION_PLACE(header.region_bytes),
        REGION_PLACE(header.line_bytes),
        REGION_PLACE(header.session),
        REGION_PLACE(header.config_digest),
        REGION_PLACE(shared),
        REGION_PLACE(shared.error),
        REGION_PLACE(shared.error_seq),
        REGION_PLACE(shared.stop),
        REGION_PLACE(unused),
        REGION_PLACE(rank[0]),
        REGION_PLACE(rank[1]),
        REGION_PLACE(rank[0].wait),
        REGION_PLACE(rank[0].wait.bell),
        REGION_PLACE(rank[0].wait.waiting),
        REGION_PLACE(rank[0].wait.parked),
        REGION_PLACE(rank[0].wait.kick),
        REGION_PLACE(rank[0].owner),
        REGION_PLACE(rank[0].owner.state),
        REGION_PLACE(rank[0].owner.pid),
        REGION_PLACE(rank[0].owner.start_ticks),
        REGION_PLACE(rank[0].owner.attach_ns),
        REGION_PLACE(rank[0].owner.attempts),
        REGION_PLACE(rank[0].channel[0]),
        REGION_PLACE(rank[0].channel[1]),
        REGION_PLACE(rank[0].channel[0].slot[0].seq),
        REGION_PLACE(rank[0].channel[0].slot[0].field),
        REGION_PLACE(rank[0].channel[0].slot[1].seq),
        REGION_PLACE(rank[0].channel[0].side[0].arrival_ns),
        REGION_PLACE(rank[0].channel[0].side[0].intent),
        REGION_PLACE(rank[0].channel[0].side[0].channel_tag),
        REGION_PLACE(rank[0].channel[0].side[0].extra),
        REGION_PLACE(rank[0].channel[0].side[1].arrival_ns),
    };

    if (num_places == NULL)
        return NULL;
    *num_places = sizeof places / sizeof places[0];
    return places;
}

dsx_code dsx_init(int fd, uint64_t session, uint64_t digest)
{
    const struct header header = {
        .magic = MAGIC,
        .abi = ABI,
        .layout = LAYOUT,
        .num_ranks = NUM_RANKS,
        .num_channels = NUM_CHANNELS,
        .num_slots = NUM_SLOTS,
        .num_fields = NUM_FIELDS,
        .region_bytes = REGION_BYTES,
        .line_bytes = LINE_BYTES,
        .session = session,
        .config_digest = digest,
    };
    dsx_code code;
    struct region *region = map_file(fd, &code);

    if (region == NULL)
        return code;
    if (region->header.magic != 0)
        code = bad_region("magic", region->header.magic, 0);
    else
        region->header = header;
    (void)munmap(region, REGION_BYTES);
    return code;
}

/* Everything that is refused before anything is written. */
static dsx_code check_attach(struct region *region, uint32_t rank, uint64_t session, uint64_t digest)
{
    struct owner_line *peer = &region->rank[1 - rank].owner;
    dsx_code code = check_header(&region->header);
    uint32_t state;
    int probe;

    if (code != DSX_OK)
        return code;
    if (region->header.session != session)
        return bad_region("session", region->header.session, session);
    if (region->header.config_digest != digest)
        return fail(NULL, DSX_DIGEST,
                    "dsx: ranks were started with different configurations (region has 0x%" PRIx64
                    ", rank %" PRIu32 " 0x%" PRIx64 ")",
                    region->header.config_digest, rank, digest);
    state = atomic_load(&peer->state);
    if (state != EMPTY && state != ATTACHED)
        return fail(NULL, DSX_PEER_LEFT, "dsx: rank %" PRIu32 " (pid %" PRIu32 ") left before sequence 1", 1 - rank,
                    atomic_load(&peer->pid));
    probe = open_pidfd((uint32_t)getpid());
    if (probe < 0)
        return fail(NULL, DSX_LIVENESS, "dsx: no pidfd (%s)", strerror(errno));
    (void)close(probe);
    return DSX_OK;
}

/* Take a rank of a mapped region that was found right. */
static dsx_code own_rank(dsx_handle *handle)
{
    struct owner_line *owner = &own_area(handle)->owner;
    const uint32_t pid = (uint32_t)getpid();
    uint64_t ticks, now_ns;
    uint32_t empty = EMPTY;

    if (!read_start_ticks(pid, &ticks))
        return fail(NULL, DSX_LIVENESS, "dsx: no pidfd is of use without /proc/%" PRIu32 "/stat", pid);
    if (!read_clock(&now_ns))
        return no_clock(NULL);
    atomic_fetch_add(&owner->attempts, 1);
    if (!atomic_compare_exchange_strong(&owner->state, &empty, ATTACHED))
        return fail(NULL, DSX_OWNED, "dsx: rank %" PRIu32 " is already attached by pid %" PRIu32 "%s", handle->rank,
                    atomic_load(&owner->pid), empty == ATTACHED ? "" : ", which left: a region is used once");
    atomic_store(&owner->start_ticks, ticks);
    atomic_store(&owner->attach_ns, now_ns);
    atomic_store(&owner->pid, pid); /* last: check_peer reads the ticks once it sees the pid */
    return DSX_OK;
}

static dsx_code make_handle(struct region *region, uint32_t rank, uint64_t timeout_ns, uint64_t spin_ns,
                            dsx_handle **made)
{
    const size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    dsx_handle *handle = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    dsx_code code;

    if (handle == MAP_FAILED)
        return bad_argument(NULL, "handle (no memory)");
    handle->region = region;
    handle->rank = rank;
    handle->pidfd = -1;
    handle->timeout_ns = timeout_ns;
    handle->spin_ns = spin_ns;
    if (madvise(handle, bytes, MADV_WIPEONFORK) != 0)
        code = bad_argument(NULL, "handle (no wipe on fork)");
    else
        code = own_rank(handle);
    if (code != DSX_OK) {
        (void)munmap(handle, bytes);
        return code;
    }
    atomic_store_explicit(&handle->life, LIVE, memory_order_relaxed);
    *made = handle;
    return DSX_OK;
}

dsx_code dsx_attach(int fd, int rank, uint64_t session, uint64_t digest, uint64_t timeout_ns, uint64_t spin_ns,
                    dsx_handle **handle)
{
    struct region *region;
    dsx_code code;

    if (handle == NULL)
        return bad_argument(NULL, "handle");
    if (rank < 0 || rank >= NUM_RANKS)
        return bad_argument(NULL, "rank");
    if (timeout_ns == 0 || timeout_ns > INT64_MAX / 2)
        return bad_argument(NULL, "timeout_ns");
    if (spin_ns > timeout_ns)
        return bad_argument(NULL, "spin_ns");
    code = check_file(fd);
    if (code != DSX_OK)
        return code;
    region = map_file(fd, &code);
    if (region == NULL)
        return code;
    code = check_attach(region, (uint32_t)rank, session, digest);
    if (code == DSX_OK)
        code = make_handle(region, (uint32_t)rank, timeout_ns, spin_ns, handle);
    if (code != DSX_OK)
        (void)munmap(region, REGION_BYTES);
    return code;
}

dsx_code dsx_set_timeout(dsx_handle *handle, uint64_t timeout_ns)
{
    const dsx_code code = enter(handle);

    if (code != DSX_OK)
        return code;
    if (timeout_ns < handle->spin_ns || timeout_ns == 0 || timeout_ns > INT64_MAX / 2)
        return leave(handle, bad_argument(handle, "timeout_ns"));
    handle->timeout_ns = timeout_ns;
    return leave(handle, DSX_OK);
}

const dsx_outcome *dsx_outcome_of(const dsx_handle *handle)
{
    return handle == NULL ? NULL : &handle->outcome;
}

dsx_code dsx_exchange(dsx_handle *handle, int channel, const void *own)
{
    const dsx_words *words = own;
    const char *bad = NULL;
    uint64_t sequence;
    dsx_code code = enter(handle);

    if (code != DSX_OK)
        return code;
    if (channel < 0 || channel >= NUM_CHANNELS)
        bad = "channel";
    else if (own == NULL)
        bad = "own";
    else if ((words->intent & ~(uint64_t)INTENTS) != 0)
        bad = "intent";
    if (bad != NULL)
        return leave(handle, bad_argument(handle, bad));
    code = failed_before(handle);
    if (code == DSX_OK && atomic_load(&handle->region->shared.stop) != 0)
        code = stopped(handle);
    if (code != DSX_OK)
        return leave(handle, code);
    sequence = handle->sequence[channel] + 1;
    code = meet(handle, channel, sequence, words);
    if (code != DSX_OK && code != DSX_PEER_ERROR && code != DSX_STOPPED)
        publish_failure(handle, code, sequence);
    return leave(handle, code);
}

/* The number of the last plan exchange as a kick names it: never 0. */
static uint32_t kick_of(const dsx_handle *handle)
{
    return (uint32_t)(handle->sequence[PLAN] % UINT32_MAX) + 1;
}

dsx_code dsx_park(dsx_handle *handle)
{
    const dsx_code code = enter(handle);

    if (code != DSX_OK)
        return code;
    atomic_store(&own_area(handle)->wait.parked, 1);
    return leave(handle, DSX_OK);
}

dsx_code dsx_kick(dsx_handle *handle)
{
    const dsx_code code = enter(handle);

    if (code != DSX_OK)
        return code;
    atomic_store(&own_area(handle)->wait.parked, 0);
    atomic_store(&peer_area(handle)->wait.kick, kick_of(handle)); /* pairs with dsx_take_kick */
    return leave(handle, DSX_OK);
}

dsx_code dsx_take_kick(dsx_handle *handle, int *kicked)
{
    const dsx_code code = enter(handle);

    if (code != DSX_OK)
        return code;
    if (kicked == NULL)
        return leave(handle, bad_argument(handle, "kicked"));
    /* When both ranks wake at once both kick, and each finds the other's during its next park: an older number. */
    *kicked = atomic_load(&own_area(handle)->wait.kick) == kick_of(handle);
    if (*kicked) {
        atomic_store(&own_area(handle)->wait.kick, 0); /* the peer kicks no more before the next exchange */
        atomic_store(&own_area(handle)->wait.parked, 0);
    }
    return leave(handle, DSX_OK);
}

dsx_code dsx_stop(int fd)
{
    dsx_code code;
    struct region *region = map_file(fd, &code);

    if (region == NULL)
        return code;
    code = check_header(&region->header);
    if (code == DSX_OK) {
        atomic_store(&region->shared.stop, 1); /* pairs with the loads in look and dsx_exchange */
        for (size_t rank = 0; rank < NUM_RANKS; rank++)
            ring(&region->rank[rank]);
    }
    (void)munmap(region, REGION_BYTES);
    return code;
}

dsx_code dsx_detach(dsx_handle *handle)
{
    uint32_t attached = ATTACHED, leaving = LEAVING;
    dsx_code code;

    if (handle != NULL && atomic_load_explicit(&handle->life, memory_order_relaxed) == DETACHED)
        return DSX_OK;
    code = enter(handle);
    if (code != DSX_OK)
        return code;
    /* A rank that has failed stays so. */
    (void)atomic_compare_exchange_strong(&own_area(handle)->owner.state, &attached, LEAVING);
    ring(peer_area(handle));
    (void)atomic_compare_exchange_strong(&own_area(handle)->owner.state, &leaving, LEFT);
    (void)munmap(handle->region, REGION_BYTES);
    handle->region = NULL;
    if (handle->pidfd >= 0)
        (void)close(handle->pidfd);
    /* The page stays, so that a late call is refused and does not read freed memory. */
    atomic_store_explicit(&handle->life, DETACHED, memory_order_relaxed);
    return leave(handle, DSX_OK);
}

dsx_code dsx_message(const dsx_handle *handle, char *text, size_t len)
{
    if (text == NULL || len == 0)
        return DSX_ARG;
    (void)snprintf(text, len, "%s", last_failure.handle == handle ? last_failure.text : "");
    return DSX_OK;
}
