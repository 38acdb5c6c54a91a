/* Walks for the thread sanitizer: traversal.c over matchers that are nothing but a counter, without XGrammar. In the last
 * walk one of them does not come back until its walk is long over. */
#define _GNU_SOURCE

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <tvm/ffi/c_api.h>

#include "traversal.h"

enum { TREES = 16, NODES = 4, COMMITS = 2, WORDS = 2, WALKS = 2000, THREADS = 4, MATCHER_TYPE = 177, SLOW = 5 };

typedef struct {
  TVMFFIObject header;
  int64_t depth; /* no atomic: two threads on one matcher are a race that the sanitizer sees */
} Matcher;

static int accept_token, fill_row, roll_back, is_terminated;
static Matcher matchers[TREES];
static atomic_bool holds; /* the slow matcher's step goes on; relaxed, so that it orders nothing else */
static atomic_int num_references;

void TVMFFIGetVersion(TVMFFIVersion *out) {
  out->major = TVM_FFI_VERSION_MAJOR;
  out->minor = TVM_FFI_VERSION_MINOR;
  out->patch = TVM_FFI_VERSION_PATCH;
}

int TVMFFIObjectIncRef(TVMFFIObjectHandle object) {
  atomic_fetch_add(&num_references, 1);
  return object == NULL;
}

int TVMFFIObjectDecRef(TVMFFIObjectHandle object) {
  atomic_fetch_sub(&num_references, 1);
  return object == NULL;
}

void TVMFFIErrorMoveFromRaised(TVMFFIObjectHandle *result) { *result = NULL; }

int TVMFFIFunctionCall(TVMFFIObjectHandle function, TVMFFIAny *arguments, int32_t count, TVMFFIAny *result) {
  Matcher *matcher = (Matcher *)arguments[0].v_obj;
  result->v_int64 = 1;
  if (function == &accept_token) {
    while (matcher == &matchers[SLOW] && atomic_load_explicit(&holds, memory_order_relaxed)) {
    }
    matcher->depth++;
  } else if (function == &roll_back) {
    matcher->depth -= arguments[1].v_int64;
  } else if (function == &is_terminated) {
    result->v_int64 = 0;
  } else {
    DLTensor *mask = arguments[1].v_ptr;
    memset((int32_t *)mask->data + arguments[2].v_int64 * WORDS, 0x7f, WORDS * sizeof(int32_t));
  }
  return count < 1;
}

static int walk_all(dsparkd_pool *pool, int32_t expected) {
  /* On the heap and gone after each walk: a worker that still looks at it is seen. */
  struct Memory {
    int64_t commits[TREES * COMMITS]; /* first: the sanitizer marks the beginning of large blocks only */
    void *handles[TREES];
    int32_t indices[TREES], roots[TREES], num_commits[TREES], usable[TREES], accepted[TREES], statuses[TREES];
    int32_t owners[TREES], grammars[TREES], mask[TREES * NODES * WORDS];
    int64_t budgets_ns[TREES], spent_ns[TREES];
    uint8_t is_stuck[TREES];
    int64_t drafts[TREES * NODES], next_token[NODES], next_sibling[NODES];
    uint8_t nodes[TREES * NODES];
    char messages[TREES * DSPARKD_MESSAGE_BYTES];
    dsparkd_walk walk;
  } *memory = calloc(1, sizeof *memory);
  if (memory == NULL) {
    return 1;
  }
  for (int32_t i = 0; i < TREES; i++) {
    memory->handles[i] = &matchers[i];
    memory->indices[i] = i;
    memory->num_commits[i] = COMMITS;
    memory->grammars[i] = i;
    memory->budgets_ns[i] = 50000000;
  }
  for (int32_t node = 0; node < NODES; node++) {
    memory->next_token[node] = node + 1 < NODES ? node + 1 : -1;
    memory->next_sibling[node] = -1;
  }
  memory->walk = (dsparkd_walk){
      .num_matchers = TREES, .num_trees = TREES, .num_nodes = NODES, .num_words = WORDS, .max_commits = COMMITS,
      .vocab_size = 64, .matchers = memory->handles, .indices = memory->indices, .roots = memory->roots,
      .num_commits = memory->num_commits, .commits = memory->commits, .next_token = memory->next_token,
      .next_sibling = memory->next_sibling, .drafts = memory->drafts, .mask = memory->mask, .nodes = memory->nodes,
      .usable_rows = memory->usable, .num_accepted = memory->accepted, .statuses = memory->statuses,
      .messages = memory->messages, .owners = memory->owners, .grammars = memory->grammars,
      .budgets_ns = memory->budgets_ns, .spent_ns = memory->spent_ns, .is_stuck = memory->is_stuck};
  int failed = dsparkd_traversal_walk(pool, &memory->walk) != DSPARKD_OK;
  for (int32_t i = 0; i < TREES; i++) {
    int is_walked = memory->usable[i] == NODES && memory->statuses[i] == DSPARKD_WALKED && memory->accepted[i] == COMMITS;
    failed |= i == SLOW ? memory->statuses[i] != expected : !is_walked;
  }
  free(memory);
  return failed;
}

/* Wait until the step that was given up has ended. */
static int outlive(dsparkd_pool *pool) {
  int64_t longest_ns = 0;
  if (dsparkd_traversal_stuck(pool, &longest_ns) != 1 || longest_ns < 50000000) {
    return 1;
  }
  atomic_store_explicit(&holds, false, memory_order_relaxed);
  for (int i = 0; i < 1000; i++) {
    if (dsparkd_traversal_stuck(pool, &longest_ns) == 0) {
      return longest_ns != 0;
    }
    nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
  }
  return 1;
}

int main(void) {
  dsparkd_methods methods = {MATCHER_TYPE, &accept_token, &fill_row, &roll_back, &is_terminated};
  dsparkd_pool *pool = NULL;
  for (int32_t i = 0; i < TREES; i++) {
    matchers[i].header.type_index = MATCHER_TYPE;
  }
  if (dsparkd_traversal_open(&methods, THREADS, &pool) != DSPARKD_OK) {
    return 2;
  }
  for (int i = 0; i < WALKS; i++) {
    if (walk_all(pool, DSPARKD_WALKED)) {
      return 3;
    }
  }
  for (int32_t i = 0; i < TREES; i++) {
    if (matchers[i].depth != WALKS * COMMITS) {
      return 4;
    }
  }
  atomic_store(&holds, true);
  if (walk_all(pool, DSPARKD_STUCK)) {
    return 5;
  }
  if (outlive(pool)) {
    return 6;
  }
  if (walk_all(pool, DSPARKD_WALKED)) { /* by the thread that took its place */
    return 7;
  }
  dsparkd_traversal_close(pool);
  if (atomic_load(&num_references) != 0) {
    return 8;
  }
  puts("walked");
  return 0;
}
