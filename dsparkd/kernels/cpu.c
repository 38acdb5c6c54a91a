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
#define HALF 8
#define BATCH_ROWS 64

typedef float lanes_t __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float))));
typedef float half_t __attribute__((vector_size(HALF * sizeof(float)), aligned(sizeof(float))));

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
INLINE void multiply_tile(const float *const *x, const float *w, size_t inner, size_t stride, float *const *out,
                          size_t column, size_t rows, size_t vectors)
{
    lanes_t sums[TILE_ROWS][TILE_VECTORS];
    for (size_t r = 0; r < rows; r++)
        for (size_t v = 0; v < vectors; v++)
            sums[r][v] = (lanes_t){0};
    for (size_t k = 0; k < inner; k++) {
        const float *line = w + k * stride + column;
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

/* The same for HALF columns. */
INLINE void multiply_half(const float *const *x, const float *w, size_t inner, size_t stride, float *const *out,
                          size_t column, size_t rows)
{
    half_t sums[TILE_ROWS];
    for (size_t r = 0; r < rows; r++)
        sums[r] = (half_t){0};
    for (size_t k = 0; k < inner; k++) {
        half_t weights = *(const half_t *)(w + k * stride + column);
        for (size_t r = 0; r < rows; r++)
            sums[r] += x[r][k] * weights;
    }
    for (size_t r = 0; r < rows; r++)
        *(half_t *)(out[r] + column) = sums[r];
}

/* All rows of one strip of columns, which then stays in the cache; width is a constant. */
INLINE void multiply_strip(const float *const *x, const float *w, size_t inner, size_t stride, float *const *out,
                           size_t column, size_t num_rows, size_t vectors)
{
    size_t r = 0;
    for (; r + TILE_ROWS <= num_rows; r += TILE_ROWS)
        multiply_tile(x + r, w, inner, stride, out + r, column, TILE_ROWS, vectors);
    for (; r + 2 <= num_rows; r += 2)
        multiply_tile(x + r, w, inner, stride, out + r, column, 2, vectors);
    for (; r < num_rows; r++)
        multiply_tile(x + r, w, inner, stride, out + r, column, 1, vectors);
}

/* out[r] [outer] = x[r] [inner] times w [inner, outer]. */
DISPATCHED static void multiply(const float *const *x, const float *w, size_t inner, size_t outer, float *const *out,
                                size_t num_rows)
{
    size_t column = 0;
    for (; column + TILE_VECTORS * LANES <= outer; column += TILE_VECTORS * LANES)
        multiply_strip(x, w, inner, outer, out, column, num_rows, TILE_VECTORS);
    for (; column + LANES <= outer; column += LANES)
        multiply_strip(x, w, inner, outer, out, column, num_rows, 1);
    for (; column + HALF <= outer; column += HALF) {
        size_t r = 0;
        for (; r + TILE_ROWS <= num_rows; r += TILE_ROWS)
            multiply_half(x + r, w, inner, outer, out + r, column, TILE_ROWS);
        for (; r < num_rows; r++)
            multiply_half(x + r, w, inner, outer, out + r, column, 1);
    }
    for (; column < outer; column++)
        for (size_t r = 0; r < num_rows; r++) {
            float sum = 0;
            for (size_t k = 0; k < inner; k++)
                sum += x[r][k] * w[k * outer + column];
            out[r][column] = sum;
        }
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
