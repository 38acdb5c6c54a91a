/* Forward-pass kernels for the cpu device, float32, one thread. Every row's result depends on that row alone, and is
 * computed by the same operations in the same order whatever the number of rows: so bits do not depend on the batch.
 * No pointer may be null unless there are no rows; matrices are row-major and contiguous. */
#ifndef DSPARKD_KERNELS_CPU_H
#define DSPARKD_KERNELS_CPU_H

#include <stddef.h>
#include <stdint.h>

/* Most residual streams that dsparkd_collapse takes. */
#define DSPARKD_MAX_STREAMS 8

/* A weight w [K, N] is stored in panels of its columns: as many of 64 as there are, then of 16, the last one filled up
 * with zero columns. A panel is contiguous, [K, width], and panels follow each other: a product reads one stream.
 * out [M, N] = x [M, K] times w. */
void dsparkd_multiply(const float *x, const float *w, size_t num_rows, size_t inner, size_t outer, float *out);

/* Hyper-connection before a sublayer, with the sublayer's RMSNorm behind it.
 * streams [T, S, D], raw [T, (2 + S) * S] = flattened streams times the mixing matrix, not yet normed,
 * scale and base [(2 + S) * S], norm [D]. Writes input [T, D], post [T, S], comb [T, S, S]. */
void dsparkd_collapse(const float *streams, const float *raw, const float *scale, const float *base, const float *norm,
                      size_t num_tokens, size_t num_streams, size_t width, int iterations, float eps, float norm_eps,
                      float *input, float *post, float *comb);

/* next[t, k] = post[t, k] * output[t] + sum_j comb[t, j, k] * streams[t, j]: [T, S, D]. */
void dsparkd_expand(const float *output, const float *streams, const float *post, const float *comb, size_t num_tokens,
                    size_t num_streams, size_t width, float *next);

/* Sum of one shard's experts, ascending, for each row: total [R, D].
 * x [R, D], expert_ids and shares [R, k]; the shard owns experts first .. first + count - 1.
 * w13[e] [D, 2I], gate columns first, and w2[e] [I, D], in panels. Returns 0, or -1 when memory runs out. */
int dsparkd_experts(const float *x, const int32_t *expert_ids, const float *shares, size_t num_rows, size_t width,
                    size_t top_k, int32_t first, int32_t count, const float *const *w13, const float *const *w2,
                    size_t expert_width, float limit, float *total);

/* Rows by source: rows[m] = ring[sources[m]], or chunk[-1 - sources[m]] where that is negative. [M, width] */
void dsparkd_gather(const float *ring, const float *chunk, const int64_t *sources, size_t num_rows, size_t width,
                    float *rows);

/* Queries and window key of each token, normed and rotated.
 * query [T, H * d]; latent: T rows of d, latent_stride floats apart; norms [H + 1, d], the key's last;
 * cosines and sines [T, r], sines with the signs -, +. Writes queries [T, H, d] and keys [T, d]. */
void dsparkd_heads(const float *query, const float *latent, size_t latent_stride, const float *norms,
                   const float *cosines, const float *sines, size_t num_tokens, size_t num_heads, size_t width,
                   size_t rotary_width, float eps, float *queries, float *keys);

/* Softmax with a sink over each token's window and entries, rotated back: output [n, H, d].
 * queries [n, H, d] carry the softmax scale. Window keys: sources [n, W] as in dsparkd_gather, from first[t] on.
 * Entries: the first counts[t] of slots [n, slots_stride], rows of entries. sink [H]. cosines and sines [n, r] of the
 * inverse rotation. Returns 0, or -1 when memory runs out. */
int dsparkd_attend(const float *queries, const float *ring, const float *chunk, const int64_t *sources,
                   const int64_t *first, size_t window, const float *entries, const int64_t *slots,
                   size_t slots_stride, const int64_t *counts, const float *sink, const float *cosines,
                   const float *sines, size_t num_tokens, size_t num_heads, size_t width, size_t rotary_width,
                   float *output);

/* Choose each token's best entries: chosen [n, chosen_stride] gets up to top_k slots, ascending by entry, then zeros.
 * queries [n, h, i], weights [n, h], keys: rows of i, by slot. Token t sees the first counts[t] of
 * slots[rows[t]] [slots_stride]; score = sum_h weight_h * max(0, query_h . key), equal scores to the lower entry.
 * Returns 0, or -1 when memory runs out. */
int dsparkd_choose(const float *queries, const float *weights, const float *keys, const int64_t *slots,
                   size_t slots_stride, const int64_t *rows, const int64_t *counts, size_t num_tokens,
                   size_t num_heads, size_t width, size_t top_k, int64_t *chosen, size_t chosen_stride);

#endif
