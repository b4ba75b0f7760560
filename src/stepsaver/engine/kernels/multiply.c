/* Rows in single precision times weights that are kept in half precision, in single-precision arithmetic.
 *
 * The weights lie in blocks of BLOCK outputs; in a block, one input after another, BLOCK numbers each: a cache line per
 * input, read from the first to the last. The last block of a weight is filled up with zeros. A row's sums run over the
 * inputs in their order whatever rows are beside it, so that no result depends on them.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define BLOCK 32     /* outputs: 16-bit numbers of a cache line */
#define STRETCH 512  /* inputs that are summed up by themselves: a shorter sum is rounded less, and stays in the cache */
#define MOST_ROWS_AVX2 6 /* whose sums, and what is multiplied, fill the registers */
#define MOST_ROWS_AVX512 14
#define AHEAD 8      /* inputs that are fetched before they are needed */

const long stepsaver_block = BLOCK;

/* Some rows, which lie `inputs_apart`, times a stretch of a block. The sums are added to what `out` holds; those of the
 * first stretch to the bias, if there is one. */
typedef struct {
    const float *x;
    const uint16_t *weights;
    const float *bias;
    float *out;
    long inputs_apart, outputs_apart, inputs;
    int is_first;
} Stretch;

typedef void (*MultiplyRows)(Stretch, long rows);

static MultiplyRows multiply_rows = NULL; /* NULL: this processor converts no 16-bit numbers fast enough */
static long most_rows = 1;

/* What float16 changes in some numbers: how many, whether any by more than it may, and the sums of squares. */
typedef struct {
    double rounded, is_worse, squared_error, squared_size;
} Change;

#define SMALL_ENOUGH 0x1p-17f /* below this a bfloat16 number may be rounded, by at most 2^-25 */
#define LARGEST_HALF 65504.0f

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
static Change narrow(const float *numbers, uint16_t *halves, long count) {
    Change change = {0};
    for (long i = 0; i < count; i++) {
        const float x = numbers[i];
        halves[i] = _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
        const float kept = _cvtsh_ss(halves[i]), error = x - kept;
        change.squared_size += (double)x * x;
        if (!(fabsf(kept) <= LARGEST_HALF)) change.is_worse = 1;
        if (kept == x) continue;
        change.rounded++;
        change.squared_error += (double)error * error;
        if (!(fabsf(x) < SMALL_ENOUGH)) change.is_worse = 1;
    }
    return change;
}

#define OF(name) name##_avx2
#define LANES 8
#define MOST_ROWS MOST_ROWS_AVX2
#define HALVES __m128i
#define WIDEN(halves) (Vector_avx2) _mm256_cvtph_ps(halves)
#include "multiply_rows.h"
#undef OF
#undef LANES
#undef MOST_ROWS
#undef HALVES
#undef WIDEN
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512bw,avx512dq,avx2,fma,f16c")
#define OF(name) name##_avx512
#define LANES 16
#define MOST_ROWS MOST_ROWS_AVX512
#define HALVES __m256i
#define WIDEN(halves) (Vector_avx512) _mm512_cvtph_ps(halves)
#include "multiply_rows.h"
#undef OF
#undef LANES
#undef MOST_ROWS
#undef HALVES
#undef WIDEN
#pragma GCC pop_options

#else
static Change narrow(const float *numbers, uint16_t *halves, long count) {
    (void)numbers, (void)halves, (void)count;
    return (Change){.is_worse = 1}; /* nobody multiplies by halves here */
}
#endif

#define TILE 64 /* numbers of a row that are laid out while their lines are in the first cache */

/* some numbers of a row, as halves */
static Change read_halves(const void *rows, long kind, long start, long width, uint16_t *halves) {
    Change change = {0};
    float numbers[TILE];
    if (kind == 0) {
        memcpy(halves, (const uint16_t *)rows + start, (size_t)width * sizeof *halves);
        for (long i = 0; i < width; i++)
            if ((halves[i] & 0x7c00) == 0x7c00) change.is_worse = 1;
        return change;
    }
    for (long i = 0; kind == 1 && i < width; i++) {
        const uint32_t bits = (uint32_t)((const uint16_t *)rows)[start + i] << 16;
        memcpy(numbers + i, &bits, sizeof bits);
    }
    return narrow(kind == 1 ? numbers : (const float *)rows + start, halves, width);
}

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
__attribute__((constructor)) static void choose_instructions(void) {
    const char *wanted = getenv("STEPSAVER_KERNELS");
    if (wanted && strcmp(wanted, "plain") == 0) return;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return;
    multiply_rows = multiply_rows_avx2;
    most_rows = MOST_ROWS_AVX2;
    if (wanted && strcmp(wanted, "avx2") == 0) return;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq")) {
        multiply_rows = multiply_rows_avx512;
        most_rows = MOST_ROWS_AVX512;
    }
}
#endif

/* Lays rows into blocks, as the halves that are nearest to their numbers. The rows are of `kind` 0: halves, 1: bfloat16,
 * 2: float; `found` sums up what changes, for halves only whether all are finite. */
void stepsaver_lay_out(const void *rows, long kind, uint16_t *blocks, long count, long inputs, double *found) {
    double rounded = 0, is_worse = 0, squared_error = 0, squared_size = 0;
#pragma omp parallel for reduction(+ : rounded, is_worse, squared_error, squared_size)
    for (long first = 0; first < count; first += BLOCK) {
        const long some = count - first < BLOCK ? count - first : BLOCK;
        for (long e = 0; e < inputs; e += TILE) {
            const long width = inputs - e < TILE ? inputs - e : TILE;
            uint16_t *to = blocks + first * inputs + e * BLOCK;
            for (long i = 0; i < some; i++) {
                uint16_t halves[TILE];
                const Change change = read_halves(rows, kind, (first + i) * inputs + e, width, halves);
                rounded += change.rounded;
                is_worse += change.is_worse;
                squared_error += change.squared_error;
                squared_size += change.squared_size;
                for (long j = 0; j < width; j++) to[j * BLOCK + i] = halves[j];
            }
        }
    }
    found[0] = rounded, found[1] = is_worse, found[2] = squared_error, found[3] = squared_size;
}

long stepsaver_multiplies_halves(void) { return multiply_rows != NULL; }

/* all rows times one block */
static void multiply_block(Stretch whole, long rows, long inputs) {
    const long passes = (rows + most_rows - 1) / most_rows, together = passes ? (rows + passes - 1) / passes : 1;
    for (long first = 0; first < inputs; first += STRETCH) {
        Stretch stretch = whole;
        stretch.weights += first * BLOCK;
        stretch.inputs = inputs - first < STRETCH ? inputs - first : STRETCH;
        stretch.is_first = first == 0;
        for (long row = 0; row < rows; row += together) {
            stretch.x = whole.x + row * whole.inputs_apart + first;
            stretch.out = whole.out + row * whole.outputs_apart;
            multiply_rows(stretch, rows - row < together ? rows - row : together);
        }
    }
}

/* The same for the last block if it is not full: `out` has no room for its zeros. */
static void multiply_rest(Stretch whole, long rows, long inputs, long outputs) {
    float beside[MOST_ROWS_AVX512 * BLOCK], bias[BLOCK] = {0};
    Stretch some = whole;
    some.out = beside;
    some.outputs_apart = BLOCK;
    if (whole.bias) some.bias = memcpy(bias, whole.bias, (size_t)outputs * sizeof(float));
    for (long row = 0; row < rows; row += most_rows) {
        const long count = rows - row < most_rows ? rows - row : most_rows;
        some.x = whole.x + row * whole.inputs_apart;
        multiply_block(some, count, inputs);
        for (long i = 0; i < count; i++)
            memcpy(whole.out + (row + i) * whole.outputs_apart, beside + i * BLOCK, (size_t)outputs * sizeof(float));
    }
}

void stepsaver_multiply(const float *x, const uint16_t *weights, const float *bias, float *out, long rows, long inputs,
                        long outputs, long inputs_apart, long outputs_apart) {
    const long blocks = (outputs + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(dynamic, 2) if (blocks > 1)
    for (long block = 0; block < blocks; block++) {
        const long start = block * BLOCK;
        const Stretch whole = {.x = x,
                               .weights = weights + start * inputs,
                               .bias = bias ? bias + start : NULL,
                               .out = out + start,
                               .inputs_apart = inputs_apart,
                               .outputs_apart = outputs_apart};
        if (outputs - start < BLOCK)
            multiply_rest(whole, rows, inputs, outputs - start);
        else
            multiply_block(whole, rows, inputs);
    }
}
