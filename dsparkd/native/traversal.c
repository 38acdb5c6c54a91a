/* The traversal; traversal.h says what it does. */
#define _POSIX_C_SOURCE 200809L

#include "traversal.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <tvm/ffi/c_api.h>

struct dsparkd_pool {
  dsparkd_methods methods;
  pid_t pid;
  int32_t num_workers;
  atomic_flag busy;
  pthread_mutex_t lock; /* guards the five below */
  pthread_cond_t work;  /* a walk began, or the pool closes */
  pthread_cond_t idle;  /* the last worker left the walk */
  const dsparkd_walk *walk;
  uint64_t generation;
  int32_t num_active;
  bool closing;
  atomic_int next_tree; /* of the current walk; relaxed, for the lock orders everything else about it */
  pthread_t workers[];
};

/* One request inside a walk. */
typedef struct {
  const dsparkd_pool *pool;
  const dsparkd_walk *walk;
  int32_t request;
  TVMFFIObject *matcher;
  int32_t *mask; /* of its tree */
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
  char *message = visit->walk->messages + (size_t)visit->request * DSPARKD_MESSAGE_BYTES;
  size_t kept = size < DSPARKD_MESSAGE_BYTES ? size : DSPARKD_MESSAGE_BYTES - 1;
  memcpy(message, text, kept);
  message[kept] = '\0';
}

/* Call a method; on failure take the raised error off this thread, keep its text, and return false. */
static bool call(const Visit *visit, void *method, TVMFFIAny *arguments, int32_t num_arguments, int64_t *result) {
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
  DLTensor mask = {.data = visit->mask,
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
  return visit->mask + (size_t)node * (size_t)visit->walk->num_words;
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

static bool is_late(const dsparkd_walk *walk) {
  if (walk->deadline_ns == 0) {
    return false;
  }
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec >= walk->deadline_ns;
}

/* Tell the matcher the tokens that were kept. */
static int32_t commit(const Visit *visit) {
  const dsparkd_walk *walk = visit->walk;
  const int64_t *ids = walk->commits + (size_t)visit->request * (size_t)walk->max_commits;
  for (int32_t i = 0; i < walk->num_commits[visit->request]; i++) {
    bool accepted = false;
    /* XGrammar cuts ids to 32 bits before it checks their range. */
    if (ids[i] < 0 || ids[i] >= walk->vocab_size) {
      return DSPARKD_COMMIT_REFUSED;
    }
    if (!accept_token(visit, ids[i], &accepted)) {
      return DSPARKD_MATCHER_FAILED;
    }
    if (!accepted) {
      return DSPARKD_COMMIT_REFUSED;
    }
    walk->num_accepted[visit->request] = i + 1;
  }
  return DSPARKD_WALKED;
}

/* Try one child of a node whose row is filled and which stands `depth` drafts below the root. */
static int32_t try_child(Visit *visit, int32_t parent, int32_t depth, int32_t child, uint8_t *state) {
  const dsparkd_walk *walk = visit->walk;
  int64_t id = walk->drafts[(size_t)walk->indices[visit->request] * (size_t)walk->num_nodes + (size_t)child];
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
static int32_t descend(Visit *visit, int32_t root, uint8_t *nodes) {
  const dsparkd_walk *walk = visit->walk;
  int32_t tree = walk->indices[visit->request];
  const int64_t *next_token = walk->next_token + (int64_t)tree * walk->link_stride;
  const int64_t *next_sibling = walk->next_sibling + (int64_t)tree * walk->link_stride;
  int32_t *parents = walk->parents + (size_t)tree * (size_t)walk->num_nodes;
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
static int32_t serve(Visit *visit, int32_t root, uint8_t *nodes) {
  const dsparkd_walk *walk = visit->walk;
  visit->matcher = walk->matchers[visit->request];
  if (visit->matcher == NULL || visit->matcher->type_index != visit->pool->methods.matcher_type) {
    return DSPARKD_BAD_HANDLE;
  }
  for (int32_t other = 0; other < visit->request; other++) {
    /* Two threads on one matcher would be a data race; batches are small, so all pairs are looked at. */
    if (walk->matchers[other] == walk->matchers[visit->request]) {
      return DSPARKD_REPEATED_HANDLE;
    }
  }
  int32_t status = commit(visit);
  if (status != DSPARKD_WALKED) {
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
  nodes[root] = DSPARKD_USABLE;
  status = descend(visit, root, nodes);
  return roll_back_to(visit, 0) ? status : DSPARKD_MATCHER_FAILED;
}

/* Do everything of one tree. */
static void visit_tree(const dsparkd_pool *pool, const dsparkd_walk *walk, int32_t tree) {
  size_t num_nodes = (size_t)walk->num_nodes;
  size_t num_words = (size_t)walk->num_words;
  uint8_t *nodes = walk->nodes + (size_t)tree * num_nodes;
  int32_t *mask = walk->mask + (size_t)tree * num_nodes * num_words;
  int32_t request = walk->owners[tree];
  int32_t root = 0;
  memset(nodes, DSPARKD_UNSEEN, num_nodes);
  if (request >= 0) {
    root = walk->roots[request];
    Visit visit = {.pool = pool, .walk = walk, .request = request, .mask = mask};
    say(&visit, "", 0);
    walk->num_accepted[request] = 0;
    int32_t status = serve(&visit, root, nodes);
    if (status > DSPARKD_LATE) {
      memset(nodes, DSPARKD_UNSEEN, num_nodes);
    } else if (status != DSPARKD_ENDED) {
      memset(nodes, DSPARKD_USABLE, (size_t)root); /* what comes before the root is not constrained */
    }
    int32_t usable = 0;
    while (usable < walk->num_nodes && nodes[usable] == DSPARKD_USABLE) {
      usable++;
    }
    walk->usable_rows[request] = usable;
    walk->statuses[request] = status;
  }
  for (size_t node = 0; node < num_nodes; node++) {
    if (nodes[node] != DSPARKD_USABLE || node < (size_t)root) {
      memset(mask + node * num_words, 0xff, num_words * sizeof *mask);
    }
  }
}

static void visit_trees(dsparkd_pool *pool, const dsparkd_walk *walk) {
  for (;;) {
    int tree = atomic_fetch_add_explicit(&pool->next_tree, 1, memory_order_relaxed);
    if (tree >= walk->num_trees) {
      return;
    }
    visit_tree(pool, walk, tree);
  }
}

static void *run_worker(void *argument) {
  dsparkd_pool *pool = argument;
  uint64_t seen = 0;
  pthread_mutex_lock(&pool->lock);
  while (!pool->closing) {
    if (pool->generation == seen) {
      pthread_cond_wait(&pool->work, &pool->lock);
      continue;
    }
    seen = pool->generation;
    const dsparkd_walk *walk = pool->walk;
    if (walk == NULL) { /* it was over before this thread woke */
      continue;
    }
    pool->num_active++;
    pthread_mutex_unlock(&pool->lock);
    visit_trees(pool, walk);
    pthread_mutex_lock(&pool->lock);
    pool->num_active--;
    if (pool->num_active == 0) {
      pthread_cond_signal(&pool->idle);
    }
  }
  pthread_mutex_unlock(&pool->lock);
  return NULL;
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
        walk->num_commits[request] > walk->max_commits) {
      return false;
    }
    walk->owners[tree] = request;
  }
  return true;
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
    result = DSPARKD_OK;
    atomic_store_explicit(&pool->next_tree, 0, memory_order_relaxed);
    if (walk->num_trees > 1 && pool->num_workers > 0) {
      pthread_mutex_lock(&pool->lock);
      pool->walk = walk;
      pool->generation++;
      pthread_cond_broadcast(&pool->work);
      pthread_mutex_unlock(&pool->lock);
    }
    visit_trees(pool, walk);
    pthread_mutex_lock(&pool->lock);
    pool->walk = NULL;
    while (pool->num_active > 0) {
      pthread_cond_wait(&pool->idle, &pool->lock);
    }
    pthread_mutex_unlock(&pool->lock);
  }
  atomic_flag_clear_explicit(&pool->busy, memory_order_release);
  return result;
}

static void end_workers(dsparkd_pool *pool) {
  pthread_mutex_lock(&pool->lock);
  pool->closing = true;
  pthread_cond_broadcast(&pool->work);
  pthread_mutex_unlock(&pool->lock);
  for (int32_t i = 0; i < pool->num_workers; i++) {
    pthread_join(pool->workers[i], NULL);
  }
}

/* Start the workers with every signal blocked, so that only Python's own threads ever handle one. */
static bool start_workers(dsparkd_pool *pool, int32_t count) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  if (pthread_sigmask(SIG_SETMASK, &all, &before) != 0) {
    return false;
  }
  while (pool->num_workers < count &&
         pthread_create(&pool->workers[pool->num_workers], NULL, run_worker, pool) == 0) {
    pool->num_workers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  return pool->num_workers == count;
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
  dsparkd_pool *pool = calloc(1, sizeof *pool + (size_t)(num_threads - 1) * sizeof *pool->workers);
  if (pool == NULL) {
    return DSPARKD_NO_RESOURCES;
  }
  pool->methods = *methods;
  pool->pid = getpid();
  atomic_flag_clear(&pool->busy);
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->work, NULL);
  pthread_cond_init(&pool->idle, NULL);
  TVMFFIObjectIncRef(methods->accept_token);
  TVMFFIObjectIncRef(methods->fill_next_token_bitmask);
  TVMFFIObjectIncRef(methods->rollback);
  TVMFFIObjectIncRef(methods->is_terminated);
  if (!start_workers(pool, num_threads - 1)) {
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
  end_workers(pool);
  TVMFFIObjectDecRef(pool->methods.accept_token);
  TVMFFIObjectDecRef(pool->methods.fill_next_token_bitmask);
  TVMFFIObjectDecRef(pool->methods.rollback);
  TVMFFIObjectDecRef(pool->methods.is_terminated);
  pthread_mutex_destroy(&pool->lock);
  pthread_cond_destroy(&pool->work);
  pthread_cond_destroy(&pool->idle);
  free(pool);
}
