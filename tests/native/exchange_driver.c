/* Drives exchange.c from C, where sanitizers see all of it: `driver threads|processes COUNT SPIN_NS`, `driver misuse`;
 * `driver measure COUNT SPIN_NS CPU CPU` prints total, skew and after-last of each exchange of both pinned ranks, and
 * `driver floor COUNT 0 CPU CPU` what this machine takes to wake a sleeping process that wakes its waker in turn;
 * `driver meeting COUNT 0 CPU CPU` what it takes two processes to meet in a word each, with a wake and a sleep alone.
 * Threads share one mapping, because a race detector knows an address and not the page behind it. Exit 1: a wrong
 * word or code, said on standard error. */
#include "exchange.c"

#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>

#define SESSION 11
#define DIGEST 22
#define TIMEOUT_NS (60 * NANOSECONDS)

#define CHECK(condition)                                                                     \
    do {                                                                                     \
        if (!(condition)) {                                                                  \
            (void)fprintf(stderr, "line %d: %s: %s\n", __LINE__, #condition, last_failure.text); \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

struct trader {
    dsx_handle *handle;
    long count;
    uint64_t sleeps;
};

static int64_t word(uint32_t rank, uint64_t sequence, int place)
{
    return (int64_t)(sequence * 1000003u + rank * 101u) + place;
}

/* `count` exchanges on both channels in turn, with pauses at random; every word of both ranks is compared. */
static void *trade(void *argument)
{
    struct trader *trader = argument;
    const uint32_t rank = trader->handle->rank;
    unsigned dice = 12345u + rank;
    const dsx_outcome *outcome = dsx_outcome_of(trader->handle);
    dsx_words own;

    for (long number = 0; number < trader->count; number++) {
        const int channel = (int)(number % NUM_CHANNELS);
        const uint64_t sequence = (uint64_t)number / NUM_CHANNELS + 1;
        const dsx_stats *stats;

        for (int place = 0; place < NUM_FIELDS; place++)
            own.field[place] = word(rank, sequence, place);
        for (int place = 0; place < NUM_EXTRA; place++)
            own.extra[place] = place == TICK_WORD ? (int64_t)sequence : word(rank, sequence, -place);
        dice = dice * 1103515245u + 12345u;
        if (dice >> 24 == 0) {
            const struct timespec pause = {.tv_nsec = (long)(dice >> 8 & 0x7fff)};
            (void)nanosleep(&pause, NULL);
        }
        own.intent = sequence & 3;
        CHECK(dsx_exchange(trader->handle, channel, &own) == DSX_OK);
        stats = &outcome->stats[channel];
        CHECK(stats->sequence == sequence);
        CHECK(stats->total_ns >= stats->after_last_ns);
        CHECK(stats->total_ns - stats->after_last_ns == 0 ||
              stats->total_ns - stats->after_last_ns == stats->arrival_skew_ns);
        trader->sleeps += stats->sleeps;
        CHECK(outcome->peer.intent == (sequence & 3));
        for (int place = 0; place < NUM_FIELDS; place++)
            CHECK(outcome->peer.field[place] == word(1 - rank, sequence, place));
        for (int place = 0; place < NUM_EXTRA; place++)
            CHECK(place == TICK_WORD || outcome->peer.extra[place] == word(1 - rank, sequence, -place));
    }
    return NULL;
}

static int make_region(void)
{
    const int fd = memfd_create("driver", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    CHECK(fd >= 0 && ftruncate(fd, REGION_BYTES) == 0);
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL) == 0);
    CHECK(dsx_init(fd, SESSION, DIGEST) == DSX_OK);
    return fd;
}

static void run_threads(long count, uint64_t spin_ns)
{
    struct trader traders[NUM_RANKS] = {{.count = count}, {.count = count}};
    pthread_t threads[NUM_RANKS];
    dsx_code code;
    const int fd = make_region();
    struct region *region = map_file(fd, &code);

    CHECK(region != NULL);
    for (uint32_t rank = 0; rank < NUM_RANKS; rank++)
        CHECK(make_handle(region, rank, TIMEOUT_NS, spin_ns, &traders[rank].handle) == DSX_OK);
    for (uint32_t rank = 0; rank < NUM_RANKS; rank++)
        CHECK(pthread_create(&threads[rank], NULL, trade, &traders[rank]) == 0);
    for (uint32_t rank = 0; rank < NUM_RANKS; rank++)
        CHECK(pthread_join(threads[rank], NULL) == 0);
    (void)printf("%lu sleeps\n", (unsigned long)(traders[0].sleeps + traders[1].sleeps));
}

static void run_processes(long count, uint64_t spin_ns)
{
    const int fd = make_region();
    const pid_t child = fork();
    const int rank = child == 0;
    struct trader trader = {.count = count};
    int status = 0;

    CHECK(child >= 0);
    CHECK(dsx_attach(fd, rank, SESSION, DIGEST, TIMEOUT_NS, spin_ns, &trader.handle) == DSX_OK);
    (void)trade(&trader);
    CHECK(dsx_detach(trader.handle) == DSX_OK);
    if (child == 0)
        _exit(0);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    (void)printf("%lu sleeps\n", (unsigned long)trader.sleeps);
}

/* Nothing but exchanges, one after the other; the child's figures come first. */
static void run_measure(long count, uint64_t spin_ns, const int *cpus)
{
    const int fd = make_region();
    const pid_t child = fork();
    const int rank = child == 0;
    const dsx_words words = {.intent = 0};
    dsx_stats *stats = calloc((size_t)count, sizeof *stats);
    dsx_handle *handle;
    cpu_set_t own;
    int status = 0;

    CPU_ZERO(&own);
    CPU_SET((size_t)cpus[rank], &own);
    CHECK(child >= 0 && stats != NULL && sched_setaffinity(0, sizeof own, &own) == 0);
    CHECK(dsx_attach(fd, rank, SESSION, DIGEST, TIMEOUT_NS, spin_ns, &handle) == DSX_OK);
    for (long number = 0; number < count; number++) {
        CHECK(dsx_exchange(handle, 0, &words) == DSX_OK);
        stats[number] = dsx_outcome_of(handle)->stats[0];
    }
    if (child != 0)
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    for (long number = 0; number < count; number++)
        (void)printf("%" PRIu64 " %" PRIu64 " %" PRIu64 "\n", stats[number].total_ns, stats[number].arrival_skew_ns,
                     stats[number].after_last_ns);
    free(stats);
}

/* Half of each round trip of one futex word between two pinned processes, which always sleep. */
static void run_floor(long count, const int *cpus)
{
    _Atomic uint32_t *word = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    const pid_t child = fork();
    const int rank = child == 0;
    uint64_t begun_ns = 0, ended_ns = 0;
    cpu_set_t own;
    int status = 0;

    CPU_ZERO(&own);
    CPU_SET((size_t)cpus[rank], &own);
    CHECK(word != MAP_FAILED && child >= 0 && sched_setaffinity(0, sizeof own, &own) == 0);
    for (uint32_t number = 0; number < (uint32_t)count; number++) {
        const uint32_t asked = 2 * number + 1, other = rank == 0 ? asked + 1 : asked;

        CHECK(read_clock(&begun_ns));
        if (rank == 0) {
            atomic_store(word, asked);
            wake(word, 1);
        }
        for (uint32_t seen = atomic_load(word); seen != other; seen = atomic_load(word))
            (void)sleep_on(word, seen, begun_ns + TIMEOUT_NS);
        if (rank == 1) {
            atomic_store(word, asked + 1);
            wake(word, 1);
            continue;
        }
        CHECK(read_clock(&ended_ns));
        (void)printf("%" PRIu64 "\n", (ended_ns - begun_ns) / 2);
    }
    if (child == 0)
        _exit(0);
    CHECK(waitpid(child, &status, 0) == child && status == 0);
}

/* The barest meeting of two pinned processes that never spin: say one's number, wake who waits for it, and sleep until
 * the other one has said its own. The child's figures come first. */
static void run_meeting(long count, const int *cpus)
{
    char *memory = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    const pid_t child = fork();
    const int rank = child == 0;
    uint64_t *spent_ns = calloc((size_t)count, sizeof *spent_ns);
    _Atomic uint32_t *own, *peer;
    uint64_t begun_ns = 0, ended_ns = 0;
    cpu_set_t cpu;
    int status = 0;

    CPU_ZERO(&cpu);
    CPU_SET((size_t)cpus[rank], &cpu);
    CHECK(memory != MAP_FAILED && spent_ns != NULL && child >= 0 && sched_setaffinity(0, sizeof cpu, &cpu) == 0);
    own = (_Atomic uint32_t *)(void *)(memory + rank * 2 * LINE_BYTES);
    peer = (_Atomic uint32_t *)(void *)(memory + (1 - rank) * 2 * LINE_BYTES);
    for (uint32_t number = 1; number <= (uint32_t)count; number++) {
        CHECK(read_clock(&begun_ns));
        atomic_store(own, number);
        wake(own, 1);
        for (uint32_t seen = atomic_load(peer); seen < number; seen = atomic_load(peer))
            (void)sleep_on(peer, seen, begun_ns + TIMEOUT_NS);
        CHECK(read_clock(&ended_ns));
        spent_ns[number - 1] = ended_ns - begun_ns;
    }
    if (child != 0)
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    for (long number = 0; number < count; number++)
        (void)printf("%" PRIu64 "\n", spent_ns[number]);
    free(spent_ns);
}

/* Every refusal that needs no peer, each with a short buffer for its text. */
static void run_misuse(void)
{
    const dsx_words own = {.intent = 0};
    dsx_handle *handle, *other;
    char text[1], longer[256];
    int kicked;
    const int fd = make_region();

    CHECK(dsx_init(fd, SESSION, DIGEST) == DSX_ABI && dsx_init(-1, SESSION, DIGEST) == DSX_ARG);
    CHECK(dsx_attach(fd, 0, SESSION + 1, DIGEST, 1, 0, &handle) == DSX_ABI);
    CHECK(dsx_attach(fd, 0, SESSION, DIGEST + 1, 1, 0, &handle) == DSX_DIGEST);
    CHECK(dsx_attach(fd, 0, SESSION, DIGEST, 20 * 1000000, 0, &handle) == DSX_OK);
    CHECK(dsx_attach(fd, 0, SESSION, DIGEST, 1, 0, &other) == DSX_OWNED);
    CHECK(dsx_message(NULL, text, 1) == DSX_OK && text[0] == '\0');
    CHECK(dsx_exchange(handle, 0, NULL) == DSX_ARG);
    CHECK(dsx_exchange(handle, 0, &own) == DSX_TIMEOUT);
    CHECK(dsx_exchange(handle, 0, &own) == DSX_PEER_ERROR);
    CHECK(dsx_message(handle, longer, sizeof longer) == DSX_OK && strstr(longer, "TIMEOUT") != NULL);
    CHECK(dsx_take_kick(handle, &kicked) == DSX_OK && dsx_park(handle) == DSX_OK && dsx_kick(handle) == DSX_OK);
    CHECK(dsx_stop(fd) == DSX_OK && dsx_stop(-1) == DSX_ARG);
    CHECK(dsx_detach(handle) == DSX_OK && dsx_detach(handle) == DSX_OK && dsx_park(handle) == DSX_ARG);
}

int main(int argc, char **argv)
{
    const long count = argc > 2 ? strtol(argv[2], NULL, 10) : 0;
    const uint64_t spin_ns = argc > 3 ? strtoull(argv[3], NULL, 10) : 0;

    const int cpus[NUM_RANKS] = {argc > 4 ? atoi(argv[4]) : 0, argc > 5 ? atoi(argv[5]) : 1};

    if (argc > 1 && strcmp(argv[1], "floor") == 0)
        run_floor(count, cpus);
    else if (argc > 1 && strcmp(argv[1], "meeting") == 0)
        run_meeting(count, cpus);
    else if (argc > 1 && strcmp(argv[1], "measure") == 0)
        run_measure(count, spin_ns, cpus);
    else if (argc > 1 && strcmp(argv[1], "threads") == 0)
        run_threads(count, spin_ns);
    else if (argc > 1 && strcmp(argv[1], "processes") == 0)
        run_processes(count, spin_ns);
    else
        run_misuse();
    return 0;
}
