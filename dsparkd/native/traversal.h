/* One call a step for all constrained rows: tells each grammar matcher the tokens that its last step kept, walks the
 * tree of its drafts, writes the mask behind every node and puts the matcher back. Runs on a pool of threads of its own,
 * needs no Python lock, and reaches XGrammar's matchers through the public C interface of apache-tvm-ffi.
 *
 * Nothing can interrupt a matcher inside a step. The caller therefore never goes into one: a step that has used its
 * request's budget of processor time is given up. Its thread works on, at idle priority, in memory of its own, holds a
 * reference to the matcher, and ends with the step; another thread takes its place. */
#ifndef DSPARKD_NATIVE_TRAVERSAL_H
#define DSPARKD_NATIVE_TRAVERSAL_H

#include <stddef.h>
#include <stdint.h>

/* Bytes of one request's message, the closing zero included. */
#define DSPARKD_MESSAGE_BYTES 256

/* What became of one request. Only after the first three may its matcher be used again. */
enum {
  DSPARKD_WALKED,          /* every node was tried */
  DSPARKD_ENDED,           /* its stop token had been accepted before the walk, so nothing can follow */
  DSPARKD_LATE,            /* the deadline passed: the root has its row, nodes further down do not */
  DSPARKD_COMMIT_REFUSED,  /* the grammar refused a token that had been kept */
  DSPARKD_MATCHER_FAILED,  /* the matcher raised: its state is unknown */
  DSPARKD_NO_TOKEN,        /* no token of the vocabulary can follow the root */
  DSPARKD_BAD_HANDLE,      /* null, or an object of another type */
  DSPARKD_REPEATED_HANDLE, /* the same matcher stands before it in the batch */
  DSPARKD_NOT_A_TREE,      /* a node is reached twice, or a link leads out of the tree */
  DSPARKD_STUCK            /* given up: its step, or one of the same grammar in this walk, used its whole budget */
};

/* What became of a whole call. Unless it is DSPARKD_OK, or DSPARKD_NO_RESOURCES from a walk, nothing was read from a
 * matcher and nothing was written. */
enum {
  DSPARKD_OK,
  DSPARKD_OTHER_VERSION, /* built against another tvm-ffi than the one that is loaded */
  DSPARKD_NO_RESOURCES,  /* memory or threads ran out; from a walk: no thread could take the place of a stuck one */
  DSPARKD_FORKED,        /* the pool's threads live in another process */
  DSPARKD_BUSY,          /* another thread is inside a call */
  DSPARKD_BAD_BATCH      /* an index, root or count is out of range, or an index is repeated */
};

/* Where a node of a tree stands after a walk. */
enum {
  DSPARKD_UNSEEN,  /* not reached: its row is all ones and says nothing */
  DSPARKD_USABLE,  /* its row says what may follow it; before the root: unconstrained, all ones */
  DSPARKD_REFUSED  /* refused by the grammar, or the end of it: its row is all ones and says nothing */
};

/* A batch of m requests over b trees of n nodes. A tree is given by the first child and the next sibling of each node,
 * -1 for none. Every array belongs to the caller and is contiguous. */
typedef struct {
  int32_t num_matchers;
  int32_t num_trees;
  int32_t num_nodes;
  int32_t num_words;          /* 32-bit words of a mask row */
  int32_t max_commits;
  int32_t commits_only;       /* not 0: tell the commits and walk nothing; mask and nodes are not touched */
  int64_t vocab_size;
  int64_t deadline_ns;        /* CLOCK_MONOTONIC; 0 is none. Looked at between nodes: one node cannot be interrupted */
  void *const *matchers;      /* [m] objects of tvm-ffi */
  const int32_t *indices;     /* [m] the tree of each request; no two alike */
  const int32_t *roots;       /* [m] the node that is accepted already; its draft id is not read */
  const int32_t *num_commits; /* [m] */
  const int64_t *commits;     /* [m, max_commits] token ids, oldest first */
  const int32_t *grammars;    /* [m] 0..m-1, alike for requests of one grammar */
  const int64_t *budgets_ns;  /* [m] processor time after which a request is given up; 0 is none */
  const int64_t *next_token;  /* [n], or [b, n] with link_stride n */
  const int64_t *next_sibling;
  int64_t link_stride;        /* 0: all trees have the same links */
  const int64_t *drafts;      /* [b, n] token ids */
  /* Written. */
  int32_t *mask;              /* [b * n, num_words]; bit id % 32 of word id / 32 */
  uint8_t *nodes;             /* [b, n] DSPARKD_UNSEEN, ... */
  int32_t *usable_rows;       /* [m] leading nodes of the tree that are usable: for a chain, all that are */
  int32_t *num_accepted;      /* [m] commits that were accepted */
  int32_t *statuses;          /* [m] DSPARKD_WALKED, ... */
  int64_t *spent_ns;          /* [m] processor time of those that were not given up */
  char *messages;             /* [m, DSPARKD_MESSAGE_BYTES] what the matcher raised, or empty */
  /* Scratch. */
  int32_t *owners;            /* [b] */
  uint8_t *is_stuck;          /* [m] by grammar */
} dsparkd_walk;

/* The matcher's methods, as tvm-ffi functions, and the type that they belong to. */
typedef struct {
  int32_t matcher_type;
  void *accept_token;
  void *fill_next_token_bitmask;
  void *rollback;
  void *is_terminated;
} dsparkd_methods;

typedef struct dsparkd_pool dsparkd_pool;

/* major, minor, patch of the tvm-ffi that this was built against, and of the one that is loaded. */
void dsparkd_traversal_versions(int32_t built[3], int32_t loaded[3]);

/* num_threads work; the calling thread only waits for them. Holds a reference to each method until dsparkd_traversal_close. */
int32_t dsparkd_traversal_open(const dsparkd_methods *methods, int32_t num_threads, dsparkd_pool **out);

/* Ends the threads and frees the pool. Frees nothing while a step that was given up still runs, for its thread needs the
 * pool at its end, and nothing in a forked child, for its locks are of no known state. */
void dsparkd_traversal_close(dsparkd_pool *pool);

/* The matchers must stay alive, and nobody else may touch them, until it returns. One that was given up must never be
 * touched again; references to it may go. */
int32_t dsparkd_traversal_walk(dsparkd_pool *pool, const dsparkd_walk *walk);

/* How many steps that were given up still run, and the processor time of the longest. */
int32_t dsparkd_traversal_stuck(dsparkd_pool *pool, int64_t *longest_ns);

#endif
