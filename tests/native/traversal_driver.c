/* Walks for the thread sanitizer: traversal.c over matchers that are nothing but a counter, without XGrammar. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tvm/ffi/c_api.h>

#include "traversal.h"

enum { TREES = 16, NODES = 4, WORDS = 2, WALKS = 2000, THREADS = 4, MATCHER_TYPE = 177 };

typedef struct {
  TVMFFIObject header;
  int64_t depth; /* no atomic: two threads on one matcher are a race that the sanitizer sees */
} Matcher;

static int accept_token, fill_row, roll_back, is_terminated;

void TVMFFIGetVersion(TVMFFIVersion *out) {
  out->major = TVM_FFI_VERSION_MAJOR;
  out->minor = TVM_FFI_VERSION_MINOR;
  out->patch = TVM_FFI_VERSION_PATCH;
}

int TVMFFIObjectIncRef(TVMFFIObjectHandle object) { return object == NULL; }

int TVMFFIObjectDecRef(TVMFFIObjectHandle object) { return object == NULL; }

void TVMFFIErrorMoveFromRaised(TVMFFIObjectHandle *result) { *result = NULL; }

int TVMFFIFunctionCall(TVMFFIObjectHandle function, TVMFFIAny *arguments, int32_t count, TVMFFIAny *result) {
  Matcher *matcher = (Matcher *)arguments[0].v_obj;
  result->v_int64 = 1;
  if (function == &accept_token) {
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

static int walk_all(dsparkd_pool *pool, Matcher *matchers) {
  /* On the heap and gone after each walk: a worker that still looks at it is seen. */
  struct Memory {
    void *handles[TREES];
    int32_t indices[TREES], roots[TREES], num_commits[TREES], usable[TREES], accepted[TREES], statuses[TREES];
    int32_t owners[TREES], parents[TREES * NODES], mask[TREES * NODES * WORDS];
    int64_t commits[TREES], next_token[NODES], next_sibling[NODES], drafts[TREES * NODES];
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
    memory->num_commits[i] = 1;
  }
  for (int32_t node = 0; node < NODES; node++) {
    memory->next_token[node] = node + 1 < NODES ? node + 1 : -1;
    memory->next_sibling[node] = -1;
  }
  memory->walk = (dsparkd_walk){
      .num_matchers = TREES, .num_trees = TREES, .num_nodes = NODES, .num_words = WORDS, .max_commits = 1,
      .vocab_size = 64, .matchers = memory->handles, .indices = memory->indices, .roots = memory->roots,
      .num_commits = memory->num_commits, .commits = memory->commits, .next_token = memory->next_token,
      .next_sibling = memory->next_sibling, .drafts = memory->drafts, .mask = memory->mask, .nodes = memory->nodes,
      .usable_rows = memory->usable, .num_accepted = memory->accepted, .statuses = memory->statuses,
      .messages = memory->messages, .owners = memory->owners, .parents = memory->parents};
  int failed = dsparkd_traversal_walk(pool, &memory->walk) != DSPARKD_OK;
  for (int32_t i = 0; i < TREES; i++) {
    failed |= memory->usable[i] != NODES || memory->statuses[i] != DSPARKD_WALKED || memory->accepted[i] != 1;
  }
  free(memory);
  return failed;
}

int main(void) {
  static Matcher matchers[TREES];
  dsparkd_methods methods = {MATCHER_TYPE, &accept_token, &fill_row, &roll_back, &is_terminated};
  dsparkd_pool *pool = NULL;
  for (int32_t i = 0; i < TREES; i++) {
    matchers[i].header.type_index = MATCHER_TYPE;
  }
  if (dsparkd_traversal_open(&methods, THREADS, &pool) != DSPARKD_OK) {
    return 2;
  }
  for (int i = 0; i < WALKS; i++) {
    if (walk_all(pool, matchers)) {
      return 3;
    }
  }
  dsparkd_traversal_close(pool);
  for (int32_t i = 0; i < TREES; i++) {
    if (matchers[i].depth != WALKS) {
      return 4;
    }
  }
  puts("walked");
  return 0;
}
