/* Rows in single precision times weights that are kept in half or single precision, in single-precision arithmetic.
 *
 * The weights lie in blocks of BLOCK outputs; in a block, one input after another, BLOCK numbers each: a cache line per
 * input, read from the first to the last. The last block of a weight is filled up with zeros. A row's sums run over the
 * inputs in their order whatever rows are beside it, so that no result depends on them.
 *
 * A block is taken stretch by stretch. As many rows as have room in the registers share what is loaded of a stretch; it
 * comes from memory once, while the rows before multiply the stretch before.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "parts.h"

#define BLOCK 32 /* outputs: 16-bit numbers of a cache line */
#define LINE 64  /* bytes */
#define STRETCH 144 /* inputs, at most, that are summed up by themselves: their weights stay in the first cache, and a
                     * shorter sum is rounded less */
#define MOST_ROWS_AVX2 6 /* whose sums, and what is multiplied, fill the registers */
#define MOST_ROWS_AVX512 MOST_TILE
#define MOST_PASSES 20 /* over a stretch, some rows each: their sums stay in the second cache */
#define WIDE_PASSES 2 /* from which on a stretch is widened once, for all of them */

const long stepsaver_block = BLOCK;

/* Some rows times a stretch of a block. Rows lie side by side, input after input. What was before, unless that is NULL,
 * is added to the sums, BLOCK per row. Meanwhile lines are fetched, one after another, `fetch_step` bytes per input. */
typedef struct {
    const float *x;
    const uint16_t *halves;
    const float *floats; /* the same weights, if they are kept so or were widened before */
    const float *before;
    float *sums;
    const char *fetch;
    long inputs, fetch_step, before_apart, sums_apart;
} Stretch;

typedef void (*MultiplyRows)(const Stretch *, long rows); /* a pointer: copying would wait for what was just written */
typedef void (*WidenStretch)(const uint16_t *halves, float *floats, long inputs);

static MultiplyRows multiply_rows = NULL; /* NULL: this processor converts no 16-bit numbers fast enough */
static WidenStretch widen_stretch = NULL;
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
    widen_stretch = widen_stretch_avx2;
    most_rows = MOST_ROWS_AVX2;
    if (wanted && strcmp(wanted, "avx2") == 0) return;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq")) {
        multiply_rows = multiply_rows_avx512;
        widen_stretch = widen_stretch_avx512;
        most_rows = MOST_ROWS_AVX512;
    }
}
#endif

/* Packs rows into blocks, as the halves that are nearest to their numbers. The rows are of `kind` 0: halves, 1: bfloat16,
 * 2: float; `found` sums up what changes, for halves only whether all are finite. */
void stepsaver_pack_weight(const void *rows, long kind, uint16_t *blocks, long count, long inputs, double *found) {
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

long stepsaver_multiplies_blocks(void) { return multiply_rows != NULL; }

/* How a product is cut up: into passes of about as many rows each, and into stretches of about as many inputs each,
 * whatever the rows are. */
typedef struct {
    Weight weight;
    const float *x; /* packed: pass after pass, in each one input after another, the pass's rows side by side */
    float *out;
    long rows, outputs_apart, together, pass_apart, stretches;
} Product;

static ALWAYS_INLINE long least(long a, long b) { return a < b ? a : b; }

static ALWAYS_INLINE long stretch_start(const Product *p, long stretch) { return p->weight.inputs * stretch / p->stretches; }

/* The rows of some passes times one block. While they multiply a stretch, the next one comes from memory; after the last
 * stretch that is the first one of `next`. */
static void multiply_block(const Product *p, long first, long rows, long block, long next) {
    _Alignas(LINE) float own[MOST_PASSES * MOST_ROWS_AVX512 * BLOCK], widened[STRETCH * BLOCK], padded[BLOCK];
    const Weight *weight = &p->weight;
    const char *weights = weight->floats ? (const char *)weight->floats : (const char *)weight->halves;
    const long bytes = BLOCK * (long)(weight->floats ? sizeof(float) : sizeof(uint16_t)); /* of an input's weights */
    const long passes = (rows + p->together - 1) / p->together, width = least(BLOCK, weight->outputs - block * BLOCK);
    const int is_whole = width == BLOCK; /* then sums go where they belong at once */
    float *result = p->out + first * p->outputs_apart + block * BLOCK, *sums = is_whole ? result : own;
    const long sums_apart = is_whole ? p->outputs_apart : BLOCK;
    const float *x = p->x + first / p->together * p->pass_apart;
    const long fetch_step = (bytes + passes - 1) / passes; /* of each pass: all of them fetch a stretch */
    const float *bias = weight->bias ? weight->bias + block * BLOCK : NULL;
    if (bias && !is_whole) bias = memcpy(memset(padded, 0, sizeof padded), bias, (size_t)width * sizeof *bias);
    for (long stretch = 0; stretch < p->stretches; stretch++) {
        const long start = stretch_start(p, stretch), inputs = stretch_start(p, stretch + 1) - start;
        const char *here = weights + (block * weight->inputs + start) * bytes;
        const char *following =
            stretch + 1 < p->stretches ? here + inputs * bytes : weights + next * weight->inputs * bytes;
        const int is_widened = !weight->floats && passes >= WIDE_PASSES;
        if (is_widened) widen_stretch((const uint16_t *)here, widened, inputs);
        for (long pass = 0; pass < passes; pass++) {
            const long row = pass * p->together, some = least(p->together, rows - row);
            const Stretch each = {.x = x + pass * p->pass_apart + start * some,
                                  .halves = (const uint16_t *)here,
                                  .floats = weight->floats ? (const float *)here : is_widened ? widened : NULL,
                                  .before = stretch ? sums + row * sums_apart : bias,
                                  .sums = sums + row * sums_apart,
                                  .fetch = following + pass * inputs * fetch_step,
                                  .inputs = inputs,
                                  .fetch_step = fetch_step,
                                  .before_apart = stretch ? sums_apart : 0,
                                  .sums_apart = sums_apart};
            multiply_rows(&each, some);
        }
    }
    for (long row = 0; !is_whole && row < rows; row++)
        memcpy(result + row * p->outputs_apart, sums + row * BLOCK, (size_t)width * sizeof *sums);
}

/* Each thread takes the next block that nobody has, one ahead, so that it knows what to fetch. */
static void multiply_blocks(const Product *p, long blocks, long *taken) {
    const long most = MOST_PASSES * p->together;
    long block = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
    while (block < blocks) {
        const long next = __atomic_fetch_add(taken, 1, __ATOMIC_RELAXED);
        for (long first = 0; first < p->rows; first += most)
            multiply_block(p, first, least(most, p->rows - first), block, first + most < p->rows ? block : next);
        block = next;
    }
}

static long passes_of(long rows) { return (rows + most_rows - 1) / most_rows; }

long rows_of_pass(long rows) { return rows ? (rows + passes_of(rows) - 1) / passes_of(rows) : 1; }

static long pass_apart(long rows, long inputs) { return rows_of_pass(rows) * inputs + PACKING_ROOM; }

long packed_size(long rows, long inputs) { return passes_of(rows) * pass_apart(rows, inputs); }

void pack_pass(const float *x, long apart, long rows, long inputs, long pass, float *packed) {
    const long together = rows_of_pass(rows), first = pass * together;
    pack_tile(x + first * apart, apart, least(together, rows - first), inputs, packed + pass * pass_apart(rows, inputs));
}

static Product product_of(const Weight *weight, const float *packed, long rows, float *out, long outputs_apart) {
    return (Product){.weight = *weight,
                     .x = packed,
                     .out = out,
                     .rows = rows,
                     .outputs_apart = outputs_apart,
                     .together = rows_of_pass(rows),
                     .pass_apart = pass_apart(rows, weight->inputs),
                     .stretches = (weight->inputs + STRETCH - 1) / STRETCH};
}

static long blocks_of(const Weight *weight) { return (weight->outputs + BLOCK - 1) / BLOCK; }

static void multiply(const Weight *weight, const float *x, float *out, long rows, long inputs_apart, long outputs_apart) {
    const long inputs = weight->inputs, blocks = blocks_of(weight);
    float *packed = rows > 1 ? malloc((size_t)packed_size(rows, inputs) * sizeof *packed) : NULL;
    if (rows > 1 && !packed) { /* a single row needs no packing */
        for (long row = 0; row < rows; row++)
            multiply(weight, x + row * inputs_apart, out + row * outputs_apart, 1, inputs_apart, outputs_apart);
        return;
    }
    const Product product = product_of(weight, packed ? packed : x, rows, out, outputs_apart);
    long taken = 0;
#pragma omp parallel if (blocks > 1)
    {
        if (packed) {
#pragma omp for
            for (long pass = 0; pass < passes_of(rows); pass++) pack_pass(x, inputs_apart, rows, inputs, pass, packed);
        }
        multiply_blocks(&product, blocks, &taken);
    }
    free(packed);
}

void multiply_shared(const Weight *weight, const float *packed, long rows, float *out, long *taken) {
    const Product product = product_of(weight, packed, rows, out, weight->outputs);
    multiply_blocks(&product, blocks_of(weight), taken);
#pragma omp barrier
}

/* Rows, `inputs_apart` numbers apart, times a weight. `kind` 0: its numbers are halves, 2: floats. */
typedef struct {
    const float *x;
    const void *blocks;
    const float *bias;
    float *out;
    long kind, rows, inputs, outputs, inputs_apart, outputs_apart;
} MultiplyCall;

void stepsaver_multiply(const MultiplyCall *c) {
    const Weight weight = {c->kind == 0 ? c->blocks : NULL, c->kind == 2 ? c->blocks : NULL, c->bias, c->inputs,
                           c->outputs};
    multiply(&weight, c->x, c->out, c->rows, c->inputs_apart, c->outputs_apart);
}

long most_rows_of_tile(void) { return most_rows; }

void multiply_tile(const Weight *weight, const float *packed, long rows, float *out) {
    const Product product = product_of(weight, packed, rows, out, weight->outputs);
    const long blocks = blocks_of(weight);
    for (long block = 0; block < blocks; block++)
        multiply_block(&product, 0, rows, block, block + 1 < blocks ? block + 1 : block);
}
