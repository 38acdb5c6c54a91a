#include "cpu.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The fastest form that the processor has is bound when the library is loaded, once. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define DISPATCHED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DISPATCHED
#endif
#define INLINE static inline __attribute__((always_inline))

#define LANES 16
#define TILE_VECTORS 4
#define TILE_ROWS 4
#define BATCH_ROWS 64

typedef float lanes_t __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));

/* e^x to about 2 ulp; inputs below the range give the smallest normal number, above it the largest power. */
INLINE float exponential(float x)
{
    const float rounding = 12582912.0f; /* 1.5 * 2^23: adding it leaves the nearest integer in the low bits */
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float shifted = x * 1.44269504f + rounding;
    float n = shifted - rounding;
    float r = x - n * 0.693359375f + n * 2.12194440e-4f; /* ln 2 in two parts, the first exact in few bits */
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union {
        int32_t i;
        float f;
    } power = {.i = ((int32_t)n + 127) << 23};
    return p * power.f;
}

INLINE float logistic(float x)
{
    return 1.0f / (1.0f + exponential(-x));
}

/* Sum of squares in LANES partial sums, added in ascending order. */
INLINE float sum_of_squares(const float *x, size_t n)
{
    float partial[LANES] = {0};
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (size_t l = 0; l < LANES; l++)
            partial[l] += x[i + l] * x[i + l];
    float total = 0;
    for (; i < n; i++)
        total += x[i] * x[i];
    for (size_t l = 0; l < LANES; l++)
        total += partial[l];
    return total;
}

/* Softmax of each row, then Sinkhorn: columns, and (iterations - 1) times rows and columns. */
INLINE void balance(float *comb, size_t S, int iterations, float eps)
{
    for (size_t j = 0; j < S; j++) {
        float *row = comb + j * S;
        float top = row[0], total = 0;
        for (size_t k = 1; k < S; k++)
            top = row[k] > top ? row[k] : top;
        for (size_t k = 0; k < S; k++)
            total += row[k] = exponential(row[k] - top);
        for (size_t k = 0; k < S; k++)
            row[k] = row[k] / total + eps;
    }
    for (int round = 0; round < iterations; round++) {
        for (size_t j = 0; round > 0 && j < S; j++) {
            float total = 0;
            for (size_t k = 0; k < S; k++)
                total += comb[j * S + k];
            total += eps;
            for (size_t k = 0; k < S; k++)
                comb[j * S + k] /= total;
        }
        float totals[DSPARKD_MAX_STREAMS] = {0};
        for (size_t j = 0; j < S; j++)
            for (size_t k = 0; k < S; k++)
                totals[k] += comb[j * S + k];
        for (size_t j = 0; j < S; j++)
            for (size_t k = 0; k < S; k++)
                comb[j * S + k] /= totals[k] + eps;
    }
}

DISPATCHED void dsparkd_collapse(const float *streams, const float *raw, const float *scale, const float *base,
                                 const float *norm, size_t num_tokens, size_t num_streams, size_t width, int iterations,
                                 float eps, float norm_eps, float *input, float *post, float *comb)
{
    const size_t S = num_streams, D = width;
    for (size_t t = 0; t < num_tokens; t++) {
        const float *x = streams + t * S * D, *m = raw + t * (2 + S) * S;
        float *y = input + t * D, *mix = comb + t * S * S;
        float pre[DSPARKD_MAX_STREAMS];
        float inverse = 1.0f / sqrtf(sum_of_squares(x, S * D) / (float)(S * D) + norm_eps);
        for (size_t s = 0; s < S; s++) {
            pre[s] = logistic(m[s] * inverse * scale[s] + base[s]) + eps;
            post[t * S + s] = 2.0f * logistic(m[S + s] * inverse * scale[S + s] + base[S + s]);
        }
        for (size_t i = 0; i < S * S; i++)
            mix[i] = m[2 * S + i] * inverse * scale[2 * S + i] + base[2 * S + i];
        if (S == 4)
            balance(mix, 4, iterations, eps); /* a constant lets the compiler unroll */
        else
            balance(mix, S, iterations, eps);
        for (size_t d = 0; d < D; d++)
            y[d] = pre[0] * x[d];
        for (size_t s = 1; s < S; s++)
            for (size_t d = 0; d < D; d++)
                y[d] += pre[s] * x[s * D + d];
        inverse = 1.0f / sqrtf(sum_of_squares(y, D) / (float)D + norm_eps);
        for (size_t d = 0; d < D; d++)
            y[d] = y[d] * inverse * norm[d];
    }
}

DISPATCHED void dsparkd_expand(const float *output, const float *streams, const float *post, const float *comb,
                               size_t num_tokens, size_t num_streams, size_t width, float *next)
{
    const size_t S = num_streams, D = width;
    for (size_t t = 0; t < num_tokens; t++) {
        const float *o = output + t * D, *x = streams + t * S * D, *mix = comb + t * S * S;
        for (size_t k = 0; k < S; k++) {
            float *to = next + (t * S + k) * D;
            for (size_t d = 0; d < D; d++)
                to[d] = post[t * S + k] * o[d];
            for (size_t j = 0; j < S; j++)
                for (size_t d = 0; d < D; d++)
                    to[d] += mix[j * S + k] * x[j * D + d];
        }
    }
}

/* out[r] = x[r] w for `rows` rows and `vectors` vectors of columns, both compile-time constants where this is inlined.
 * Each element is one chain of multiply-adds over ascending k, however many rows go together. */
INLINE void multiply_tile(const float *const *x, const float *panel, size_t inner, float *const *out, size_t column,
                          size_t rows, size_t vectors)
{
    lanes_t sums[TILE_ROWS][TILE_VECTORS];
    for (size_t r = 0; r < rows; r++)
        for (size_t v = 0; v < vectors; v++)
            sums[r][v] = (lanes_t){0};
    for (size_t k = 0; k < inner; k++) {
        const float *line = panel + k * vectors * LANES;
        for (size_t v = 0; v < vectors; v++) {
            lanes_t weights = *(const lanes_t *)(line + v * LANES);
            for (size_t r = 0; r < rows; r++)
                sums[r][v] += x[r][k] * weights;
        }
    }
    for (size_t r = 0; r < rows; r++)
        for (size_t v = 0; v < vectors; v++)
            *(lanes_t *)(out[r] + column + v * LANES) = sums[r][v];
}

/* All rows of one panel, which then stays in the cache; its width is a constant. */
INLINE void multiply_panel(const float *const *x, const float *panel, size_t inner, float *const *out, size_t column,
                           size_t num_rows, size_t vectors)
{
    size_t r = 0;
    for (; r + TILE_ROWS <= num_rows; r += TILE_ROWS)
        multiply_tile(x + r, panel, inner, out + r, column, TILE_ROWS, vectors);
    for (; r + 2 <= num_rows; r += 2)
        multiply_tile(x + r, panel, inner, out + r, column, 2, vectors);
    for (; r < num_rows; r++)
        multiply_tile(x + r, panel, inner, out + r, column, 1, vectors);
}

/* The last columns, too few for LANES: their panel is filled up with zeros, and its surplus sums are dropped. */
INLINE void multiply_rest(const float *const *x, const float *panel, size_t inner, float *const *out, size_t column,
                          size_t num_rows, size_t num_columns)
{
    float sums[BATCH_ROWS][LANES];
    float *rows[BATCH_ROWS];
    for (size_t r = 0; r < num_rows; r++)
        rows[r] = sums[r];
    multiply_panel(x, panel, inner, rows, 0, num_rows, 1);
    for (size_t r = 0; r < num_rows; r++)
        memcpy(out[r] + column, sums[r], num_columns * sizeof(float));
}

/* out[r] [outer] = x[r] [inner] times w, in panels, for at most BATCH_ROWS rows. */
DISPATCHED static void multiply(const float *const *x, const float *w, size_t inner, size_t outer, float *const *out,
                                size_t num_rows)
{
    size_t column = 0;
    for (; column + TILE_VECTORS * LANES <= outer; column += TILE_VECTORS * LANES)
        multiply_panel(x, w + column * inner, inner, out, column, num_rows, TILE_VECTORS);
    for (; column + LANES <= outer; column += LANES)
        multiply_panel(x, w + column * inner, inner, out, column, num_rows, 1);
    if (column < outer)
        multiply_rest(x, w + column * inner, inner, out, column, num_rows, outer - column);
}

void dsparkd_multiply(const float *x, const float *w, size_t num_rows, size_t inner, size_t outer, float *out)
{
    const float *inputs[BATCH_ROWS];
    float *outputs[BATCH_ROWS];
    for (size_t first = 0; first < num_rows; first += BATCH_ROWS) {
        size_t rows = num_rows - first < BATCH_ROWS ? num_rows - first : BATCH_ROWS;
        for (size_t r = 0; r < rows; r++) {
            inputs[r] = x + (first + r) * inner;
            outputs[r] = out + (first + r) * outer;
        }
        multiply(inputs, w, inner, outer, outputs, rows);
    }
}

/* gated[i] = silu(min(gate, limit)) * clamp(up, -limit, limit) * share, over hidden = gate [I] then up [I]. */
DISPATCHED static void gate(const float *hidden, size_t expert_width, float limit, float share, float *gated)
{
    for (size_t i = 0; i < expert_width; i++) {
        float a = hidden[i], b = hidden[expert_width + i];
        a = a > limit ? limit : a;
        b = b > limit ? limit : b;
        b = b < -limit ? -limit : b;
        gated[i] = a * logistic(a) * b * share;
    }
}

DISPATCHED static void add(const float *from, size_t n, float *to)
{
    for (size_t i = 0; i < n; i++)
        to[i] += from[i];
}

int dsparkd_experts(const float *x, const int32_t *expert_ids, const float *shares, size_t num_rows, size_t width,
                    size_t top_k, int32_t first, int32_t count, const float *const *w13, const float *const *w2,
                    size_t expert_width, float limit, float *total)
{
    if (num_rows == 0)
        return 0; /* then the pointers may be null */
    const size_t D = width, I = expert_width, num_choices = num_rows * top_k;
    float *scratch = malloc(BATCH_ROWS * (3 * I + D) * sizeof(float));
    if (scratch == NULL)
        return -1;
    const float *inputs[BATCH_ROWS], *gated[BATCH_ROWS];
    float *hidden[BATCH_ROWS], *outputs[BATCH_ROWS];
    size_t choices[BATCH_ROWS];
    for (size_t r = 0; r < BATCH_ROWS; r++) {
        hidden[r] = scratch + r * 2 * I;
        gated[r] = scratch + (BATCH_ROWS * 2 + r) * I;
        outputs[r] = scratch + BATCH_ROWS * 3 * I + r * D;
    }
    memset(total, 0, num_rows * D * sizeof(float));
    for (int32_t e = 0; e < count; e++) {
        size_t next = 0;
        while (next < num_choices) {
            size_t rows = 0;
            for (; next < num_choices && rows < BATCH_ROWS; next++)
                if (expert_ids[next] == first + e) {
                    choices[rows] = next;
                    inputs[rows++] = x + next / top_k * D;
                }
            multiply(inputs, w13[e], D, 2 * I, hidden, rows);
            for (size_t r = 0; r < rows; r++)
                gate(hidden[r], I, limit, shares[choices[r]], scratch + (BATCH_ROWS * 2 + r) * I);
            multiply(gated, w2[e], I, D, outputs, rows);
            for (size_t r = 0; r < rows; r++)
                add(outputs[r], D, total + choices[r] / top_k * D);
        }
    }
    free(scratch);
    return 0;
}

void dsparkd_gather(const float *ring, const float *chunk, const int64_t *sources, size_t num_rows, size_t width,
                    float *rows)
{
    for (size_t m = 0; m < num_rows; m++) {
        const int64_t source = sources[m];
        const float *from = source >= 0 ? ring + (size_t)source * width : chunk + (size_t)(-1 - source) * width;
        memcpy(rows + m * width, from, width * sizeof(float));
    }
}

/* Rotate interleaved pairs of x in place; sines carry the signs -, +. */
INLINE void rotate(float *x, const float *cosines, const float *sines, size_t rotary_width)
{
    for (size_t i = 0; i < rotary_width; i += 2) {
        float even = x[i], odd = x[i + 1];
        x[i] = even * cosines[i] + odd * sines[i];
        x[i + 1] = odd * cosines[i + 1] + even * sines[i + 1];
    }
}

DISPATCHED void dsparkd_heads(const float *query, const float *latent, size_t latent_stride, const float *norms,
                              const float *cosines, const float *sines, size_t num_tokens, size_t num_heads,
                              size_t width, size_t rotary_width, float eps, float *queries, float *keys)
{
    const size_t H = num_heads, d = width, r = rotary_width;
    for (size_t t = 0; t < num_tokens; t++)
        for (size_t h = 0; h <= H; h++) {
            const float *from = h < H ? query + (t * H + h) * d : latent + t * latent_stride;
            float *to = h < H ? queries + (t * H + h) * d : keys + t * d;
            const float inverse = 1.0f / sqrtf(sum_of_squares(from, d) / (float)d + eps);
            for (size_t i = 0; i < d; i++)
                to[i] = from[i] * inverse * norms[h * d + i];
            rotate(to + d - r, cosines + t * r, sines + t * r, r);
        }
}

/* Sum of the lanes, by halving. */
INLINE float sum_lanes(const lanes_t *v)
{
    float x[LANES];
    memcpy(x, v, sizeof x);
    for (size_t n = LANES / 2; n > 0; n /= 2)
        for (size_t i = 0; i < n; i++)
            x[i] += x[n + i];
    return x[0];
}

/* logits[h][l] = query[h] . key[l] for `heads` heads, a compile-time constant where this is inlined. */
INLINE void score(const float *query, const float *const *keys, size_t num_keys, size_t width, size_t heads,
                  float *logits)
{
    for (size_t l = 0; l < num_keys; l++) {
        lanes_t sums[TILE_ROWS];
        float rest[TILE_ROWS];
        for (size_t h = 0; h < heads; h++) {
            sums[h] = (lanes_t){0};
            rest[h] = 0;
        }
        size_t i = 0;
        for (; i + LANES <= width; i += LANES) {
            lanes_t key = *(const lanes_t *)(keys[l] + i);
            for (size_t h = 0; h < heads; h++)
                sums[h] += *(const lanes_t *)(query + h * width + i) * key;
        }
        for (; i < width; i++)
            for (size_t h = 0; h < heads; h++)
                rest[h] += query[h * width + i] * keys[l][i];
        for (size_t h = 0; h < heads; h++)
            logits[h * num_keys + l] = sum_lanes(&sums[h]) + rest[h];
    }
}

/* output[h] = sum_l shares[h][l] * key[l], over columns column .. column + vectors * LANES - 1. */
INLINE void mix_tile(const float *shares, const float *const *keys, size_t num_keys, size_t width, size_t column,
                     size_t heads, size_t vectors, float *output)
{
    lanes_t sums[TILE_ROWS][TILE_VECTORS];
    for (size_t h = 0; h < heads; h++)
        for (size_t v = 0; v < vectors; v++)
            sums[h][v] = (lanes_t){0};
    for (size_t l = 0; l < num_keys; l++)
        for (size_t v = 0; v < vectors; v++) {
            lanes_t key = *(const lanes_t *)(keys[l] + column + v * LANES);
            for (size_t h = 0; h < heads; h++)
                sums[h][v] += shares[h * num_keys + l] * key;
        }
    for (size_t h = 0; h < heads; h++)
        for (size_t v = 0; v < vectors; v++)
            *(lanes_t *)(output + h * width + column + v * LANES) = sums[h][v];
}

INLINE void mix(const float *shares, const float *const *keys, size_t num_keys, size_t width, size_t heads,
                float *output)
{
    size_t column = 0;
    for (; column + TILE_VECTORS * LANES <= width; column += TILE_VECTORS * LANES)
        mix_tile(shares, keys, num_keys, width, column, heads, TILE_VECTORS, output);
    for (; column + LANES <= width; column += LANES)
        mix_tile(shares, keys, num_keys, width, column, heads, 1, output);
    for (; column < width; column++)
        for (size_t h = 0; h < heads; h++) {
            float sum = 0;
            for (size_t l = 0; l < num_keys; l++)
                sum += shares[h * num_keys + l] * keys[l][column];
            output[h * width + column] = sum;
        }
}

/* Turn logits [num_keys] into shares; the sink takes its part of the total and no value. */
INLINE void share_out(float *logits, size_t num_keys, float sink)
{
    float top = sink, total = 0;
    for (size_t l = 0; l < num_keys; l++)
        top = logits[l] > top ? logits[l] : top;
    for (size_t l = 0; l < num_keys; l++)
        logits[l] = exponential(logits[l] - top);
    for (size_t l = 0; l < num_keys; l++)
        total += logits[l];
    total += exponential(sink - top);
    const float inverse = 1.0f / total;
    for (size_t l = 0; l < num_keys; l++)
        logits[l] *= inverse;
}

/* One token's attention over gathered key pointers; logits holds TILE_ROWS * num_keys floats. */
DISPATCHED static void attend_token(const float *queries, const float *const *keys, size_t num_keys, const float *sink,
                                    const float *cosines, const float *sines, size_t num_heads, size_t width,
                                    size_t rotary_width, float *logits, float *output)
{
    for (size_t h = 0; h < num_heads;) {
        const size_t heads = h + TILE_ROWS <= num_heads ? TILE_ROWS : 1;
        if (heads == TILE_ROWS)
            score(queries + h * width, keys, num_keys, width, TILE_ROWS, logits);
        else
            score(queries + h * width, keys, num_keys, width, 1, logits);
        for (size_t i = 0; i < heads; i++)
            share_out(logits + i * num_keys, num_keys, sink[h + i]);
        if (heads == TILE_ROWS)
            mix(logits, keys, num_keys, width, TILE_ROWS, output + h * width);
        else
            mix(logits, keys, num_keys, width, 1, output + h * width);
        for (size_t i = 0; i < heads; i++)
            rotate(output + (h + i + 1) * width - rotary_width, cosines, sines, rotary_width);
        h += heads;
    }
}

int dsparkd_attend(const float *queries, const float *ring, const float *chunk, const int64_t *sources,
                   const int64_t *first, size_t window, const float *entries, const int64_t *slots,
                   size_t slots_stride, const int64_t *counts, const float *sink, const float *cosines,
                   const float *sines, size_t num_tokens, size_t num_heads, size_t width, size_t rotary_width,
                   float *output)
{
    const size_t most_keys = window + slots_stride;
    const float **keys = malloc(most_keys * sizeof *keys);
    float *logits = malloc(TILE_ROWS * most_keys * sizeof *logits);
    if (keys == NULL || logits == NULL) {
        free(keys);
        free(logits);
        return -1;
    }
    for (size_t t = 0; t < num_tokens; t++) {
        size_t num_keys = 0;
        for (size_t i = (size_t)first[t]; i < window; i++) {
            const int64_t source = sources[t * window + i];
            keys[num_keys++] = source >= 0 ? ring + (size_t)source * width : chunk + (size_t)(-1 - source) * width;
        }
        for (size_t i = 0; slots_stride > 0 && i < (size_t)counts[t]; i++)
            keys[num_keys++] = entries + (size_t)slots[t * slots_stride + i] * width;
        attend_token(queries + t * num_heads * width, keys, num_keys, sink, cosines + t * rotary_width,
                     sines + t * rotary_width, num_heads, width, rotary_width, logits, output + t * num_heads * width);
    }
    free(keys);
    free(logits);
    return 0;
}

/* scores[l] = sum_h weights[h] * max(0, query[h] . key[l]), in blocks of keys that stay in the cache. */
DISPATCHED static void score_entries(const float *query, const float *weights, const float *const *keys,
                                     size_t num_keys, size_t num_heads, size_t width, float *scores)
{
    float products[TILE_ROWS * BATCH_ROWS];
    for (size_t at = 0; at < num_keys; at += BATCH_ROWS) {
        const size_t count = num_keys - at < BATCH_ROWS ? num_keys - at : BATCH_ROWS;
        for (size_t l = 0; l < count; l++)
            scores[at + l] = 0;
        for (size_t h = 0; h < num_heads;) {
            const size_t heads = h + TILE_ROWS <= num_heads ? TILE_ROWS : 1;
            if (heads == TILE_ROWS)
                score(query + h * width, keys + at, count, width, TILE_ROWS, products);
            else
                score(query + h * width, keys + at, count, width, 1, products);
            for (size_t i = 0; i < heads; i++)
                for (size_t l = 0; l < count; l++) {
                    const float product = products[i * count + l];
                    scores[at + l] += weights[h + i] * (product > 0 ? product : 0);
                }
            h += heads;
        }
    }
}

/* Whether entry a comes behind entry b: a lower score, or an equal one and a higher index. */
INLINE int is_worse(const float *scores, size_t a, size_t b)
{
    return scores[a] < scores[b] || (scores[a] == scores[b] && a > b);
}

/* Let the entry at the root of a heap, worst entry first, sink to its place. */
static void sift(const float *scores, size_t *heap, size_t size, size_t root)
{
    for (;;) {
        size_t worst = root;
        for (size_t child = 2 * root + 1; child <= 2 * root + 2 && child < size; child++)
            if (is_worse(scores, heap[child], heap[worst]))
                worst = child;
        if (worst == root)
            return;
        size_t entry = heap[root];
        heap[root] = heap[worst];
        heap[worst] = entry;
        root = worst;
    }
}

int dsparkd_choose(const float *queries, const float *weights, const float *keys, const int64_t *slots,
                   size_t slots_stride, const int64_t *rows, const int64_t *counts, size_t num_tokens,
                   size_t num_heads, size_t width, size_t top_k, int64_t *chosen, size_t chosen_stride)
{
    const float **pointers = malloc(slots_stride * sizeof *pointers);
    float *scores = malloc(slots_stride * sizeof *scores);
    char *kept = malloc(slots_stride);
    size_t *heap = malloc(top_k * sizeof *heap);
    const int failed = pointers == NULL || scores == NULL || kept == NULL || heap == NULL;
    for (size_t t = 0; !failed && t < num_tokens; t++) {
        const int64_t *own = slots + (size_t)rows[t] * slots_stride;
        const size_t count = (size_t)counts[t];
        int64_t *to = chosen + t * chosen_stride;
        memset(to, 0, chosen_stride * sizeof *to);
        if (count <= top_k) {
            memcpy(to, own, count * sizeof *to);
            continue;
        }
        for (size_t l = 0; l < count; l++)
            pointers[l] = keys + (size_t)own[l] * width;
        score_entries(queries + t * num_heads * width, weights + t * num_heads, pointers, count, num_heads, width,
                      scores);
        for (size_t l = 0; l < top_k; l++)
            heap[l] = l;
        for (size_t root = top_k / 2; root-- > 0;)
            sift(scores, heap, top_k, root);
        for (size_t l = top_k; l < count; l++)
            if (is_worse(scores, heap[0], l)) {
                heap[0] = l;
                sift(scores, heap, top_k, 0);
            }
        memset(kept, 0, count);
        for (size_t l = 0; l < top_k; l++)
            kept[heap[l]] = 1;
        for (size_t l = 0; l < count; l++)
            if (kept[l])
                *to++ = own[l];
    }
    free(pointers);
    free(scores);
    free(kept);
    free(heap);
    return failed ? -1 : 0;
}
