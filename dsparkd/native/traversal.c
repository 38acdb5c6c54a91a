/* The traversal; traversal.h says what it does. */
#define _GNU_SOURCE /* SCHED_IDLE, gettid */

#include "traversal.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <tvm/ffi/c_api.h>

/* How often a caller that waits looks whether a step has become too long; most walks are over before. */
#define LOOK_NS 5000000

/* Where a worker stands. It goes from BUSY to SETTLING by itself, or the caller takes it to ABANDONED: whoever changes
 * the stage first decides whether the worker may still touch the walk. */
enum { RESTING, BUSY, SETTLING, ABANDONED };

typedef struct worker {
  dsparkd_pool *pool;
  struct worker *next; /* in the pool's list of workers, or of those that it has given up */
  pthread_t thread;
  pid_t tid;
  clockid_t clock;  /* of its processor time */
  atomic_int stage; /* stored with release behind the two below, and read with acquire before them */
  int32_t request;
  int64_t begun_ns; /* its processor time when it began with the request */
  char *memory;     /* its own, for one request */
  size_t num_bytes;
  char message[DSPARKD_MESSAGE_BYTES];
} Worker;

struct dsparkd_pool {
  dsparkd_methods methods;
  pid_t pid;
  atomic_flag busy;
  pthread_mutex_t lock; /* guards all below */
  pthread_cond_t work;  /* a walk began, or the pool closes */
  pthread_cond_t over;  /* the last request of the walk is settled */
  const dsparkd_walk *walk;
  int32_t next_request;
  int32_t num_left; /* requests that are not settled */
  int32_t num_threads; /* workers that there should be */
  int32_t num_workers;
  int32_t num_stuck;
  Worker *workers;
  Worker *stuck; /* they end when their step does */
  bool closing;
};

/* One request inside a walk. */
typedef struct {
  const dsparkd_pool *pool;
  const atomic_int *stage;  /* of its worker */
  const dsparkd_walk *walk; /* of this request and its tree alone, in the worker's own memory */
  TVMFFIObject *matcher;
  int32_t *parents; /* of the nodes on the way down */
  int32_t ahead; /* drafts that the matcher has accepted and not yet given back */
} Visit;

void dsparkd_traversal_versions(int32_t built[3], int32_t loaded[3]) {
  TVMFFIVersion version = {0};
  TVMFFIGetVersion(&version);
  built[0] = TVM_FFI_VERSION_MAJOR;
  built[1] = TVM_FFI_VERSION_MINOR;
  built[2] = TVM_FFI_VERSION_PATCH;
  loaded[0] = (int32_t)version.major;
  loaded[1] = (int32_t)version.minor;
  loaded[2] = (int32_t)version.patch;
}

static void say(const Visit *visit, const char *text, size_t size) {
  char *message = visit->walk->messages;
  size_t kept = size < DSPARKD_MESSAGE_BYTES ? size : DSPARKD_MESSAGE_BYTES - 1;
  memcpy(message, text, kept);
  message[kept] = '\0';
}

/* Call a method; on failure take the raised error off this thread, keep its text, and return false. A request that was
 * given up calls nothing more. */
static bool call(const Visit *visit, void *method, TVMFFIAny *arguments, int32_t num_arguments, int64_t *result) {
  if (atomic_load_explicit(visit->stage, memory_order_relaxed) == ABANDONED) {
    return false;
  }
  TVMFFIAny answer = {.type_index = kTVMFFINone};
  if (TVMFFIFunctionCall(method, arguments, num_arguments, &answer) == 0) {
    *result = answer.v_int64;
    return true;
  }
  TVMFFIObjectHandle error = NULL;
  TVMFFIErrorMoveFromRaised(&error);
  if (error == NULL) {
    static const char unknown[] = "failed without an error";
    say(visit, unknown, sizeof unknown - 1);
    return false;
  }
  const TVMFFIErrorCell *cell = (const TVMFFIErrorCell *)((const char *)error + sizeof(TVMFFIObject));
  say(visit, cell->message.data, cell->message.size);
  TVMFFIObjectDecRef(error);
  return false;
}

static TVMFFIAny of_matcher(const Visit *visit) {
  return (TVMFFIAny){.type_index = visit->matcher->type_index, .v_obj = visit->matcher};
}

static TVMFFIAny of_int(int64_t value) { return (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = value}; }

static TVMFFIAny of_false(void) { return (TVMFFIAny){.type_index = kTVMFFIBool, .v_int64 = 0}; }

static bool accept_token(const Visit *visit, int64_t id, bool *accepted) {
  TVMFFIAny arguments[3] = {of_matcher(visit), of_int(id), of_false()};
  int64_t result = 0;
  bool called = call(visit, visit->pool->methods.accept_token, arguments, 3, &result);
  *accepted = result != 0;
  return called;
}

static bool is_terminated(const Visit *visit, bool *terminated) {
  TVMFFIAny arguments[1] = {of_matcher(visit)};
  int64_t result = 0;
  bool called = call(visit, visit->pool->methods.is_terminated, arguments, 1, &result);
  *terminated = result != 0;
  return called;
}

/* Take back drafts until `depth` of them are left. */
static bool roll_back_to(Visit *visit, int32_t depth) {
  if (visit->ahead == depth) {
    return true;
  }
  TVMFFIAny arguments[2] = {of_matcher(visit), of_int(visit->ahead - depth)};
  int64_t result = 0;
  visit->ahead = depth;
  return call(visit, visit->pool->methods.rollback, arguments, 2, &result);
}

static bool fill_row(const Visit *visit, int32_t node) {
  const dsparkd_walk *walk = visit->walk;
  int64_t shape[2] = {walk->num_nodes, walk->num_words};
  int64_t strides[2] = {walk->num_words, 1};
  DLTensor mask = {.data = walk->mask,
                   .device = {kDLCPU, 0},
                   .ndim = 2,
                   .dtype = {kDLInt, 32, 1},
                   .shape = shape,
                   .strides = strides};
  TVMFFIAny tensor = {.type_index = kTVMFFIDLTensorPtr, .v_ptr = &mask};
  TVMFFIAny arguments[4] = {of_matcher(visit), tensor, of_int(node), of_false()};
  int64_t result = 0;
  return call(visit, visit->pool->methods.fill_next_token_bitmask, arguments, 4, &result);
}

static const int32_t *row_of(const Visit *visit, int32_t node) {
  return visit->walk->mask + (size_t)node * (size_t)visit->walk->num_words;
}

static bool has_bit(const Visit *visit, int32_t node, int64_t id) {
  return ((uint32_t)row_of(visit, node)[id / 32] >> (id % 32)) & 1U;
}

/* Whether a row allows any id; bits behind the last id mean nothing and may be set. */
static bool has_any_bit(const Visit *visit, int32_t node) {
  const int32_t *row = row_of(visit, node);
  int32_t last = visit->walk->num_words - 1;
  for (int32_t word = 0; word < last; word++) {
    if (row[word] != 0) {
      return true;
    }
  }
  return ((uint32_t)row[last] & (UINT32_MAX >> (31 - (visit->walk->vocab_size - 1) % 32))) != 0;
}

static int64_t now_ns(clockid_t clock) {
  struct timespec now = {0};
  clock_gettime(clock, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static bool is_late(const dsparkd_walk *walk) {
  return walk->deadline_ns != 0 && now_ns(CLOCK_MONOTONIC) >= walk->deadline_ns;
}

/* Tell the matcher the tokens that were kept. */
static int32_t commit(const Visit *visit) {
  const dsparkd_walk *walk = visit->walk;
  for (int32_t i = 0; i < *walk->num_commits; i++) {
    bool accepted = false;
    /* XGrammar cuts ids to 32 bits before it checks their range. */
    if (walk->commits[i] < 0 || walk->commits[i] >= walk->vocab_size) {
      return DSPARKD_COMMIT_REFUSED;
    }
    if (!accept_token(visit, walk->commits[i], &accepted)) {
      return DSPARKD_MATCHER_FAILED;
    }
    if (!accepted) {
      return DSPARKD_COMMIT_REFUSED;
    }
    *walk->num_accepted = i + 1;
  }
  return DSPARKD_WALKED;
}

/* Try one child of a node whose row is filled and which stands `depth` drafts below the root. */
static int32_t try_child(Visit *visit, int32_t parent, int32_t depth, int32_t child, uint8_t *state) {
  const dsparkd_walk *walk = visit->walk;
  int64_t id = walk->drafts[child];
  bool yes = false;
  *state = DSPARKD_REFUSED;
  /* Asked of the mask first: XGrammar writes a line to standard error for each token that it refuses. */
  if (id < 0 || id >= walk->vocab_size || !has_bit(visit, parent, id)) {
    return DSPARKD_WALKED;
  }
  if (is_late(walk)) {
    *state = DSPARKD_UNSEEN;
    return DSPARKD_LATE;
  }
  if (!roll_back_to(visit, depth) || !accept_token(visit, id, &yes)) {
    return DSPARKD_MATCHER_FAILED;
  }
  if (!yes) {
    return DSPARKD_WALKED;
  }
  visit->ahead++;
  if (!is_terminated(visit, &yes)) {
    return DSPARKD_MATCHER_FAILED;
  }
  if (yes) { /* behind the stop token there is nothing to choose */
    return DSPARKD_WALKED;
  }
  if (!fill_row(visit, child)) {
    return DSPARKD_MATCHER_FAILED;
  }
  if (has_any_bit(visit, child)) {
    *state = DSPARKD_USABLE;
  }
  return DSPARKD_WALKED;
}

/* Walk the tree depth first from the root, whose row is filled. */
static int32_t descend(Visit *visit, int32_t root) {
  const dsparkd_walk *walk = visit->walk;
  const int64_t *next_token = walk->next_token;
  const int64_t *next_sibling = walk->next_sibling;
  int32_t *parents = visit->parents;
  uint8_t *nodes = walk->nodes;
  int32_t node = root;
  int32_t depth = 0;
  int64_t child = next_token[root];
  for (;;) {
    if (child < 0) {
      if (node == root) {
        return DSPARKD_WALKED;
      }
      child = next_sibling[node];
      node = parents[node];
      depth--;
      continue;
    }
    if (child >= walk->num_nodes || child < root || nodes[child] != DSPARKD_UNSEEN) {
      return DSPARKD_NOT_A_TREE;
    }
    int32_t here = (int32_t)child;
    int32_t status = try_child(visit, node, depth, here, &nodes[here]);
    if (status != DSPARKD_WALKED) {
      return status;
    }
    if (nodes[here] == DSPARKD_USABLE) {
      parents[here] = node;
      node = here;
      depth++;
      child = next_token[here];
    } else {
      child = next_sibling[here];
    }
  }
}

/* Commit, walk and give back; returns the request's status. */
static int32_t serve(Visit *visit) {
  const dsparkd_walk *walk = visit->walk;
  int32_t root = *walk->roots;
  int32_t status = commit(visit);
  if (status != DSPARKD_WALKED || walk->commits_only) {
    return status;
  }
  bool terminated = false;
  if (!is_terminated(visit, &terminated)) {
    return DSPARKD_MATCHER_FAILED;
  }
  if (terminated) {
    return DSPARKD_ENDED;
  }
  if (!fill_row(visit, root)) {
    return DSPARKD_MATCHER_FAILED;
  }
  if (!has_any_bit(visit, root)) {
    return DSPARKD_NO_TOKEN;
  }
  walk->nodes[root] = DSPARKD_USABLE;
  status = descend(visit, root);
  return roll_back_to(visit, 0) ? status : DSPARKD_MATCHER_FAILED;
}

/* Whether a request cannot be served at all; then its status is written. */
static bool is_refused(const dsparkd_pool *pool, const dsparkd_walk *walk, int32_t request) {
  const TVMFFIObject *matcher = walk->matchers[request];
  if (matcher == NULL || matcher->type_index != pool->methods.matcher_type) {
    walk->statuses[request] = DSPARKD_BAD_HANDLE;
    return true;
  }
  for (int32_t other = 0; other < request; other++) {
    /* Two threads on one matcher would be a data race; batches are small, so all pairs are looked at. */
    if (walk->matchers[other] == matcher) {
      walk->statuses[request] = DSPARKD_REPEATED_HANDLE;
      return true;
    }
  }
  return false;
}

static void *take(char **memory, size_t num_bytes) {
  void *taken = *memory;
  *memory += (num_bytes + 7) / 8 * 8;
  return taken;
}

/* Copy one request and its tree into the worker's memory, so that a step which is given up reads and writes nothing of
 * the caller's. False when there is no memory. */
static bool copy_in(Worker *worker, const dsparkd_walk *walk, int32_t request, dsparkd_walk *own, int32_t **parents) {
  size_t nodes = (size_t)walk->num_nodes;
  size_t row = (size_t)walk->num_words * sizeof *walk->mask;
  size_t commits = (size_t)walk->max_commits;
  size_t wanted = nodes * (row + 3 * sizeof(int64_t) + sizeof(int32_t) + 1) + commits * sizeof(int64_t) + 256;
  if (worker->num_bytes < wanted) {
    free(worker->memory);
    worker->memory = malloc(wanted);
    worker->num_bytes = worker->memory == NULL ? 0 : wanted;
    if (worker->memory == NULL) {
      return false;
    }
  }
  char *memory = worker->memory;
  size_t tree = (size_t)walk->indices[request];
  size_t links = nodes * sizeof(int64_t);
  int64_t *next_token = take(&memory, links);
  int64_t *next_sibling = take(&memory, links);
  int64_t *drafts = take(&memory, links);
  int64_t *ids = take(&memory, commits * sizeof *ids);
  memcpy(next_token, walk->next_token + (int64_t)tree * walk->link_stride, links);
  memcpy(next_sibling, walk->next_sibling + (int64_t)tree * walk->link_stride, links);
  memcpy(drafts, walk->drafts + tree * nodes, links);
  memcpy(ids, walk->commits + (size_t)request * commits, commits * sizeof *ids);
  int32_t *root = take(&memory, sizeof *root);
  int32_t *num_commits = take(&memory, sizeof *num_commits);
  *root = walk->roots[request];
  *num_commits = walk->num_commits[request];
  *own = *walk;
  own->next_token = next_token;
  own->next_sibling = next_sibling;
  own->drafts = drafts;
  own->commits = ids;
  own->roots = root;
  own->num_commits = num_commits;
  own->num_accepted = take(&memory, sizeof *own->num_accepted);
  *parents = take(&memory, nodes * sizeof **parents);
  own->nodes = take(&memory, nodes);
  own->mask = take(&memory, nodes * row);
  own->messages = worker->message;
  *own->num_accepted = 0;
  *own->messages = '\0';
  memset(own->nodes, DSPARKD_UNSEEN, nodes);
  return true;
}

/* Write a request's outcome where the caller looks for it. own: NULL where nothing was walked. */
static void copy_out(const dsparkd_walk *walk, int32_t request, int32_t status, int64_t spent_ns,
                     const dsparkd_walk *own) {
  size_t num_nodes = (size_t)walk->num_nodes;
  size_t num_words = (size_t)walk->num_words;
  size_t tree = (size_t)walk->indices[request];
  size_t root = (size_t)walk->roots[request];
  uint8_t *nodes = walk->nodes + tree * num_nodes;
  int32_t *mask = walk->mask + tree * num_nodes * num_words;
  char *message = walk->messages + (size_t)request * DSPARKD_MESSAGE_BYTES;
  walk->statuses[request] = status;
  walk->spent_ns[request] = spent_ns;
  walk->num_accepted[request] = own == NULL ? 0 : *own->num_accepted;
  if (own == NULL) {
    *message = '\0';
  } else {
    memcpy(message, own->messages, strlen(own->messages) + 1);
  }
  walk->usable_rows[request] = 0;
  if (walk->commits_only) {
    return;
  }
  if (own == NULL || status > DSPARKD_LATE) {
    memset(nodes, DSPARKD_UNSEEN, num_nodes);
  } else {
    memcpy(nodes, own->nodes, num_nodes);
    if (status != DSPARKD_ENDED) {
      memset(nodes, DSPARKD_USABLE, root); /* what comes before the root is not constrained */
    }
  }
  for (size_t node = 0; node < num_nodes; node++) {
    if (own != NULL && nodes[node] == DSPARKD_USABLE && node >= root) {
      memcpy(mask + node * num_words, own->mask + node * num_words, num_words * sizeof *mask);
    } else {
      memset(mask + node * num_words, 0xff, num_words * sizeof *mask);
    }
  }
  int32_t usable = 0;
  while (usable < walk->num_nodes && nodes[usable] == DSPARKD_USABLE) {
    usable++;
  }
  walk->usable_rows[request] = usable;
}

/* Do everything of one request. False when the caller has given it up meanwhile. */
static bool visit(Worker *worker, const dsparkd_walk *walk, int32_t request) {
  dsparkd_walk own;
  if (is_refused(worker->pool, walk, request)) {
    copy_out(walk, request, walk->statuses[request], 0, NULL);
    return true;
  }
  int32_t *parents = NULL;
  if (!copy_in(worker, walk, request, &own, &parents)) {
    copy_out(walk, request, DSPARKD_MATCHER_FAILED, 0, NULL);
    return true;
  }
  Visit at = {.pool = worker->pool,
              .stage = &worker->stage,
              .walk = &own,
              .matcher = walk->matchers[request],
              .parents = parents};
  TVMFFIObjectIncRef(at.matcher); /* the caller lets go of it when it gives the step up */
  worker->request = request;
  worker->begun_ns = now_ns(worker->clock);
  atomic_store_explicit(&worker->stage, BUSY, memory_order_release); /* pairs with the acquire in look_after */
  int32_t status = serve(&at);
  TVMFFIObjectDecRef(at.matcher);
  int64_t spent_ns = now_ns(worker->clock) - worker->begun_ns;
  int expected = BUSY;
  if (!atomic_compare_exchange_strong(&worker->stage, &expected, SETTLING)) {
    return false;
  }
  copy_out(walk, request, status, spent_ns, &own);
  return true;
}

static void unlink_worker(Worker **list, const Worker *worker) {
  while (*list != worker) {
    list = &(*list)->next;
  }
  *list = worker->next;
}

/* Note that a request will get no row: its step, or that of another one with its grammar, was given up. Under the lock. */
static void settle_stuck(dsparkd_pool *pool, const dsparkd_walk *walk, int32_t request) {
  copy_out(walk, request, DSPARKD_STUCK, 0, NULL);
  pool->num_left--;
  if (pool->num_left == 0) {
    pthread_cond_signal(&pool->over);
  }
}

static void *run_worker(void *argument) {
  Worker *worker = argument;
  dsparkd_pool *pool = worker->pool;
  bool kept = true;
  pthread_mutex_lock(&pool->lock);
  worker->tid = gettid();
  while (kept && !pool->closing) {
    const dsparkd_walk *walk = pool->walk;
    if (walk == NULL || pool->next_request >= walk->num_matchers) {
      pthread_cond_wait(&pool->work, &pool->lock);
      continue;
    }
    int32_t request = pool->next_request++;
    if (walk->is_stuck[walk->grammars[request]]) {
      settle_stuck(pool, walk, request);
      continue;
    }
    pthread_mutex_unlock(&pool->lock);
    kept = visit(worker, walk, request);
    pthread_mutex_lock(&pool->lock);
    if (kept) {
      atomic_store_explicit(&worker->stage, RESTING, memory_order_relaxed); /* the lock orders it */
      pool->num_left--;
      if (pool->num_left == 0) {
        pthread_cond_signal(&pool->over);
      }
    }
  }
  if (!kept) {
    unlink_worker(&pool->stuck, worker);
    pool->num_stuck--;
  }
  pthread_mutex_unlock(&pool->lock);
  if (!kept) { /* nobody joins it; the others are freed by who does */
    free(worker->memory);
    free(worker);
  }
  return NULL;
}

/* Start a worker with every signal blocked, so that only Python's own threads ever handle one. Under the lock. */
static bool start_worker(dsparkd_pool *pool) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  Worker *worker = calloc(1, sizeof *worker);
  if (worker == NULL) {
    return false;
  }
  worker->pool = pool;
  if (pthread_sigmask(SIG_SETMASK, &all, &before) != 0) {
    free(worker);
    return false;
  }
  bool started = pthread_create(&worker->thread, NULL, run_worker, worker) == 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (!started) {
    free(worker);
    return false;
  }
  pthread_getcpuclockid(worker->thread, &worker->clock);
  worker->next = pool->workers;
  pool->workers = worker;
  pool->num_workers++;
  return true;
}

/* Start what workers are missing; whether none is any more. Under the lock. */
static bool fill_workers(dsparkd_pool *pool) {
  while (pool->num_workers < pool->num_threads && start_worker(pool)) {
  }
  return pool->num_workers == pool->num_threads;
}

/* Leave a worker to its step, at idle priority, and put another in its place. Under the lock. */
static void give_up(dsparkd_pool *pool, const dsparkd_walk *walk, Worker *worker) {
  unlink_worker(&pool->workers, worker);
  pool->num_workers--;
  worker->next = pool->stuck;
  pool->stuck = worker;
  pool->num_stuck++;
  pthread_detach(worker->thread);
  const struct sched_param none = {0};
  sched_setscheduler(worker->tid, SCHED_IDLE, &none);
  walk->is_stuck[walk->grammars[worker->request]] = 1;
  settle_stuck(pool, walk, worker->request);
  fill_workers(pool);
}

/* Give up the steps that have used their time. Under the lock; processor time, for a busy machine is nobody's fault. */
static void look_after(dsparkd_pool *pool, const dsparkd_walk *walk) {
  Worker *next = NULL;
  for (Worker *worker = pool->workers; worker != NULL; worker = next) {
    next = worker->next;
    int expected = BUSY;
    if (atomic_load_explicit(&worker->stage, memory_order_acquire) != BUSY) { /* pairs with the release in visit */
      continue;
    }
    int64_t budget_ns = walk->budgets_ns[worker->request];
    if (budget_ns > 0 && now_ns(worker->clock) - worker->begun_ns > budget_ns &&
        atomic_compare_exchange_strong(&worker->stage, &expected, ABANDONED)) {
      give_up(pool, walk, worker);
    }
  }
}

/* Note which request each tree belongs to; false when the batch makes no sense. */
static bool find_owners(const dsparkd_walk *walk) {
  if (walk->num_trees < 0 || walk->num_nodes < 1 || walk->num_words < 1 || walk->num_matchers < 0 ||
      walk->vocab_size < 1 || (walk->vocab_size + 31) / 32 != walk->num_words || walk->max_commits < 0) {
    return false;
  }
  for (int32_t tree = 0; tree < walk->num_trees; tree++) {
    walk->owners[tree] = -1;
  }
  for (int32_t request = 0; request < walk->num_matchers; request++) {
    int32_t tree = walk->indices[request];
    if (tree < 0 || tree >= walk->num_trees || walk->owners[tree] >= 0 || walk->roots[request] < 0 ||
        walk->roots[request] >= walk->num_nodes || walk->num_commits[request] < 0 ||
        walk->num_commits[request] > walk->max_commits || walk->grammars[request] < 0 ||
        walk->grammars[request] >= walk->num_matchers) {
      return false;
    }
    walk->owners[tree] = request;
    walk->is_stuck[request] = 0;
  }
  return true;
}

/* The rows of trees that no request names. */
static void free_other_trees(const dsparkd_walk *walk) {
  size_t num_nodes = (size_t)walk->num_nodes;
  size_t num_bytes = num_nodes * (size_t)walk->num_words * sizeof *walk->mask;
  for (size_t tree = 0; tree < (size_t)walk->num_trees; tree++) {
    if (walk->owners[tree] < 0 && !walk->commits_only) {
      memset(walk->nodes + tree * num_nodes, DSPARKD_UNSEEN, num_nodes);
      memset((char *)walk->mask + tree * num_bytes, 0xff, num_bytes);
    }
  }
}

/* Hand the requests to the workers and wait until all are settled; false when no worker is left for some. */
static bool let_work(dsparkd_pool *pool, const dsparkd_walk *walk) {
  bool served = true;
  pthread_mutex_lock(&pool->lock);
  pool->walk = walk;
  pool->next_request = 0;
  pool->num_left = walk->num_matchers;
  fill_workers(pool); /* there may be threads again */
  if (walk->num_matchers == 1) {
    pthread_cond_signal(&pool->work);
  } else {
    pthread_cond_broadcast(&pool->work);
  }
  while (pool->num_left > 0) {
    int64_t look_ns = now_ns(CLOCK_MONOTONIC) + LOOK_NS;
    struct timespec look = {.tv_sec = look_ns / 1000000000, .tv_nsec = look_ns % 1000000000};
    if (pthread_cond_timedwait(&pool->over, &pool->lock, &look) == ETIMEDOUT) {
      look_after(pool, walk);
    }
    while (pool->num_workers == 0 && pool->next_request < walk->num_matchers) {
      served = false;
      settle_stuck(pool, walk, pool->next_request++);
    }
  }
  pool->walk = NULL;
  pthread_mutex_unlock(&pool->lock);
  return served;
}

int32_t dsparkd_traversal_walk(dsparkd_pool *pool, const dsparkd_walk *walk) {
  if (pool->pid != getpid()) {
    return DSPARKD_FORKED;
  }
  if (atomic_flag_test_and_set_explicit(&pool->busy, memory_order_acquire)) { /* pairs with the clear below */
    return DSPARKD_BUSY;
  }
  int32_t result = DSPARKD_BAD_BATCH;
  if (find_owners(walk)) {
    free_other_trees(walk);
    result = let_work(pool, walk) ? DSPARKD_OK : DSPARKD_NO_RESOURCES;
  }
  atomic_flag_clear_explicit(&pool->busy, memory_order_release);
  return result;
}

int32_t dsparkd_traversal_stuck(dsparkd_pool *pool, int64_t *longest_ns) {
  *longest_ns = 0;
  pthread_mutex_lock(&pool->lock);
  int32_t num_stuck = pool->num_stuck;
  for (const Worker *worker = pool->stuck; worker != NULL; worker = worker->next) {
    int64_t spent_ns = now_ns(worker->clock) - worker->begun_ns;
    *longest_ns = spent_ns > *longest_ns ? spent_ns : *longest_ns;
  }
  pthread_mutex_unlock(&pool->lock);
  return num_stuck;
}

/* End the workers that rest; whether none is left that its step keeps. */
static bool end_workers(dsparkd_pool *pool) {
  pthread_mutex_lock(&pool->lock);
  pool->closing = true;
  pthread_cond_broadcast(&pool->work);
  pthread_mutex_unlock(&pool->lock);
  while (pool->workers != NULL) {
    Worker *worker = pool->workers;
    pool->workers = worker->next;
    pthread_join(worker->thread, NULL);
    free(worker->memory);
    free(worker);
  }
  pthread_mutex_lock(&pool->lock);
  bool alone = pool->num_stuck == 0;
  pthread_mutex_unlock(&pool->lock);
  return alone;
}

int32_t dsparkd_traversal_open(const dsparkd_methods *methods, int32_t num_threads, dsparkd_pool **out) {
  int32_t built[3];
  int32_t loaded[3];
  dsparkd_traversal_versions(built, loaded);
  if (built[0] != loaded[0] || built[1] != loaded[1]) {
    return DSPARKD_OTHER_VERSION;
  }
  if (num_threads < 1) {
    return DSPARKD_BAD_BATCH;
  }
  dsparkd_pool *pool = calloc(1, sizeof *pool);
  if (pool == NULL) {
    return DSPARKD_NO_RESOURCES;
  }
  pool->methods = *methods;
  pool->pid = getpid();
  pool->num_threads = num_threads;
  atomic_flag_clear(&pool->busy);
  pthread_condattr_t monotonic;
  pthread_condattr_init(&monotonic);
  pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->work, NULL);
  pthread_cond_init(&pool->over, &monotonic);
  pthread_condattr_destroy(&monotonic);
  TVMFFIObjectIncRef(methods->accept_token);
  TVMFFIObjectIncRef(methods->fill_next_token_bitmask);
  TVMFFIObjectIncRef(methods->rollback);
  TVMFFIObjectIncRef(methods->is_terminated);
  pthread_mutex_lock(&pool->lock);
  bool started = fill_workers(pool);
  pthread_mutex_unlock(&pool->lock);
  if (!started) {
    dsparkd_traversal_close(pool);
    return DSPARKD_NO_RESOURCES;
  }
  *out = pool;
  return DSPARKD_OK;
}

void dsparkd_traversal_close(dsparkd_pool *pool) {
  if (pool->pid != getpid()) {
    return;
  }
  if (!end_workers(pool)) {
    return; /* a step that was given up needs lock and methods when it ends, and nobody can wait for that */
  }
  TVMFFIObjectDecRef(pool->methods.accept_token);
  TVMFFIObjectDecRef(pool->methods.fill_next_token_bitmask);
  TVMFFIObjectDecRef(pool->methods.rollback);
  TVMFFIObjectDecRef(pool->methods.is_terminated);
  pthread_mutex_destroy(&pool->lock);
  pthread_cond_destroy(&pool->work);
  pthread_cond_destroy(&pool->over);
  free(pool);
}
