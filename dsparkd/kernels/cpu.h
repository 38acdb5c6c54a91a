/* Forward-pass kernels for the cpu device, float32, one thread. Every row's result depends on that row alone, and is
 * computed by the same operations in the same order whatever the number of rows: so bits do not depend on the batch.
 * No pointer may be null; matrices are row-major and contiguous. */
#ifndef DSPARKD_KERNELS_CPU_H
#define DSPARKD_KERNELS_CPU_H

#include <stddef.h>
#include <stdint.h>

/* Most residual streams that dsparkd_collapse takes. */
#define DSPARKD_MAX_STREAMS 8

/* out [M, N] = x [M, K] times w [K, N]. */
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
 * w13[e] [D, 2I], gate columns first; w2[e] [I, D]. Returns 0, or -1 when memory runs out. */
int dsparkd_experts(const float *x, const int32_t *expert_ids, const float *shares, size_t num_rows, size_t width,
                    size_t top_k, int32_t first, int32_t count, const float *const *w13, const float *const *w2,
                    size_t expert_width, float limit, float *total);

#endif
