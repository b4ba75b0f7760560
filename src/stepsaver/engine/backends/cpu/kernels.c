/* What lies between the matrix multiplications of a layer, one call each.
 *
 * Between two multiplications, which stream megabytes of weights, every operation of a framework starts from cold
 * caches and costs tens of microseconds whatever it computes. These loops replace some twenty of them
 * per layer. Each row is computed by itself, so that a result does not depend on the rows beside it.
 *
 * Single precision, rows in memory order. `kernels.py` beside this describes every function.
 */
#include <float.h>
#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "parts.h"

/* of this source, so that nobody uses what was built from another one */
const char stepsaver_source[] = SOURCE_HASH;

#define LONGEST_CONTEXT 512 /* rows that attention keeps the scores of */
#define LONGEST_HEAD 256
const long stepsaver_longest_context = LONGEST_CONTEXT, stepsaver_longest_head = LONGEST_HEAD;

#define TILE 24    /* queries that one thread attends at a time */
#define TOGETHER 6 /* queries whose results fill the registers */
#define CHUNK (2 * LANES) /* keys whose scores fill them */

_Static_assert(LONGEST_CONTEXT % 32 == 0, "scores are stored in whole chunks, whatever the width of a vector");
_Static_assert(TOGETHER == 6, "FOR_COUNT counts to six");

/* calls a function with a number of queries that the compiler knows */
#define FOR_COUNT(count, function, ...)          \
    switch (count) {                             \
    case 1: function(__VA_ARGS__, 1); break;     \
    case 2: function(__VA_ARGS__, 2); break;     \
    case 3: function(__VA_ARGS__, 3); break;     \
    case 4: function(__VA_ARGS__, 4); break;     \
    case 5: function(__VA_ARGS__, 5); break;     \
    default: function(__VA_ARGS__, TOGETHER);    \
    }

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define UNROLLED _Pragma("unroll")
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Mask){__VA_ARGS__})
#define UNROLLED _Pragma("GCC unroll 16")
#endif

typedef float Lanes8 __attribute__((vector_size(32)));
typedef int32_t Mask8 __attribute__((vector_size(32))); /* all bits of a lane where a comparison holds */
typedef float Lanes16 __attribute__((vector_size(64)));
typedef int32_t Mask16 __attribute__((vector_size(64)));

typedef struct {
    float plain, exponentials;
} Sums;

/* Keys and values that are read next. They lie in other pages than those of now, across which the processor foresees
 * nothing. */
typedef struct {
    const char *keys, *values;
    long bytes; /* of each */
} Fetch;

/* brings one of some equal parts nearer */
static ALWAYS_INLINE void fetch_part(const char *from, long bytes, long part, long parts) {
    const long last = bytes * (part + 1) / parts;
    for (long byte = bytes * part / parts; byte < last; byte += 64) __builtin_prefetch(from + byte, 0, 2);
}

#define LANES 8
#define Lanes Lanes8
#define Mask Mask8
#define OF(name) name##_plain
#include "rows.h"
#undef OF

typedef struct {
    void (*rms_norm)(float *, const float *, const float *, float *, long, float);
    void (*silu_product)(const float *, const float *, float *, long);
    void (*norm_heads)(float *, const float *, long, long, float);
    void (*rotate)(float *, const float *, const float *, long, long);
    float (*largest)(const float *, long);
    Sums (*sums_of)(const float *, long, float);
    void (*attend)(const float *const *, float *const *, long, const float *, const float *, const View *, long, float,
                   Fetch);
    void (*pack)(const float *, long, long, long, float *);
} RowFunctions;

static const RowFunctions plain = {rms_norm_plain, silu_product_row_plain, norm_heads_plain, rotate_row_plain,
                                   largest_plain,   sums_of_plain,          attend_tile_plain, pack_rows_plain};
static const RowFunctions *rows_of = &plain, *attends_narrow = &plain; /* heads that do not fill wide vectors */

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define OF(name) name##_avx2
#include "rows.h"
#undef OF
#pragma GCC pop_options

static const RowFunctions avx2 = {rms_norm_avx2, silu_product_row_avx2, norm_heads_avx2, rotate_row_avx2,
                                  largest_avx2,   sums_of_avx2,          attend_tile_avx2, pack_rows_avx2};

#undef LANES
#undef Lanes
#undef Mask
#define LANES 16
#define Lanes Lanes16
#define Mask Mask16
#pragma GCC push_options
#pragma GCC target("avx512f,avx512dq,avx512vl,avx512bw,fma")
#define OF(name) name##_avx512
#include "rows.h"
#undef OF
#pragma GCC pop_options

static const RowFunctions avx512 = {rms_norm_avx512, silu_product_row_avx512, norm_heads_avx512, rotate_row_avx512,
                                    largest_avx512,   sums_of_avx512,          attend_tile_avx512, pack_rows_avx512};

__attribute__((constructor)) static void choose_instructions(void) {
    const char *wanted = getenv("STEPSAVER_KERNELS");
    if (wanted && strcmp(wanted, "plain") == 0) return;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return;
    rows_of = attends_narrow = &avx2;
    if (wanted && strcmp(wanted, "avx2") == 0) return;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512bw"))
        rows_of = &avx512;
}
#endif

/* numbers from which on a second thread pays */
#define MANY 16384

void stepsaver_rms_norm(float *x, const float *pending, const float *norm_weight, float *out, long rows, long width,
                        float eps) {
#pragma omp parallel for if (rows * width > MANY)
    for (long row = 0; row < rows; row++)
        rms_norm(x + row * width, pending ? pending + row * width : NULL, norm_weight, out + row * width, width, eps);
}

void stepsaver_silu_product(const float *gate_up, float *out, long rows, long width) {
#pragma omp parallel for if (rows * width > MANY / 2)
    for (long row = 0; row < rows; row++) {
        const float *gate = gate_up + row * 2 * width;
        rows_of->silu_product(gate, gate + width, out + row * width, width);
    }
}

int are_below(const int64_t *indices, long count, long limit) {
    int fit = 1;
    for (long i = 0; i < count; i++) fit &= (uint64_t)indices[i] < (uint64_t)limit;
    return fit;
}

int places_fit(const Heads *heads, const Place *places, long count) {
    int fit = 1;
    for (long i = 0; i < count; i++)
        fit &= (uint64_t)places[i].slot < (uint64_t)heads->slots &&
               (uint64_t)places[i].position < (uint64_t)heads->capacity;
    return fit;
}

int segments_fit(const Heads *heads, Attending attending, long rows) {
    const long most = heads->capacity < LONGEST_CONTEXT ? heads->capacity : LONGEST_CONTEXT;
    int fit = attending.count == 0 || (heads->head_dim % 8 == 0 && heads->head_dim <= LONGEST_HEAD);
    for (long i = 0; i < attending.count; i++) {
        const Segment s = attending.segments[i];
        fit &= s.start >= 0 && s.start < s.stop && s.stop <= rows && (uint64_t)s.slot < (uint64_t)heads->slots;
        for (long row = s.start; fit && row < s.stop; row++) {
            const View view = attending.views[row];
            fit = view.gap >= 0 && view.gap <= view.resume && view.resume <= view.seen && view.seen <= most &&
                  view.resume - view.gap < view.seen;
        }
    }
    return fit;
}

long stepsaver_copy_rows(const float *x, float *stored, const int64_t *indices, long rows, long width,
                         long stored_rows) {
    if (!are_below(indices, rows, stored_rows)) return OUT_OF_BOUNDS;
#pragma omp parallel for if (rows * width > MANY)
    for (long row = 0; row < rows; row++)
        memcpy(stored + indices[row] * width, x + row * width, (size_t)width * sizeof(float));
    return FINE;
}

/* Tiles of a segment's queries with the heads that share a key-value head. */
static long tiles_of(Segment segment, long group) { return ((segment.stop - segment.start) * group + TILE - 1) / TILE; }

long threads_at_most(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

/* The keys of a task; its values lie kv_heads * capacity rows on. */
static const float *keys_of(const Heads *heads, const float *stored, Segment segment, long kv_head) {
    return stored + (segment.slot * 2 * heads->kv_heads + kv_head) * heads->capacity * heads->head_dim;
}

/* What the task after this one reads. */
static Fetch fetch_of(const Heads *heads, const float *stored, Segment segment, const View *views, long kv_head) {
    const float *keys = keys_of(heads, stored, segment, kv_head);
    const long seen = views[segment.stop - 1].seen;
    return (Fetch){(const char *)keys, (const char *)(keys + heads->kv_heads * heads->capacity * heads->head_dim),
                   seen * heads->head_dim * (long)sizeof(float)};
}

/* Attends the queries from `first` on, at most TILE of them, of a sample's heads that share a key-value head. */
static void attend_task(const Heads *heads, const float *queries, long query_stride, float *out, const float *stored,
                        Segment segment, const View *views, long kv_head, long first, Fetch next) {
    const long rows = segment.stop - segment.start, group = heads->heads / heads->kv_heads, width = heads->head_dim;
    const float *of_tile[TILE];
    float *to_tile[TILE];
    View of_query[TILE];
    long count = 0;
    for (long query = first; query < rows * group && count < TILE; query++, count++) {
        const long row = segment.start + query % rows, head = kv_head * group + query / rows;
        of_query[count] = views[row];
        of_tile[count] = queries + row * query_stride + head * width;
        to_tile[count] = out + (row * heads->heads + head) * width;
    }
    const float *keys = keys_of(heads, stored, segment, kv_head);
    const RowFunctions *attends = width % 16 ? attends_narrow : rows_of;
    attends->attend(of_tile, to_tile, count, keys, keys + heads->kv_heads * heads->capacity * width, of_query, width,
                    1.0f / sqrtf((float)width), next);
}

void rms_norm(float *x, const float *pending, const float *norm_weight, float *out, long width, float eps) {
    rows_of->rms_norm(x, pending, norm_weight, out, width, eps);
}

void pack_tile(const float *x, long apart, long rows, long inputs, float *packed) {
    rows_of->pack(x, apart, rows, inputs, packed);
}

void silu_product_row(const float *gate_up, float *out, long width) {
    rows_of->silu_product(gate_up, gate_up + width, out, width);
}

static ALWAYS_INLINE void copy_head(float *restrict to, const float *restrict from, long width) {
    if (width % 8 == 0) /* without a call: heads are short */
        for (long i = 0; i < width; i += 8) memcpy(to + i, from + i, 8 * sizeof(float));
    else
        memcpy(to, from, (size_t)width * sizeof(float));
}

void store_row(const Heads *heads, float *row, Rotation rotation, long n, float *stored, const Place *place) {
    const long width = heads->head_dim, half = width / 2, queries = heads->heads * width;
    const float *turns = rotation.turns + n * 2 * width;
    if (heads->norms) {
        rows_of->norm_heads(row, heads->norms, heads->heads, width, heads->eps);
        if (place) rows_of->norm_heads(row + queries, heads->norms + width, heads->kv_heads, width, heads->eps);
    }
    rows_of->rotate(row, turns, turns + width + half, heads->heads + (place ? heads->kv_heads : 0), half);
    for (long i = 0; rotation.query_scale && i < queries; i++) row[i] *= rotation.query_scale[n];
    if (!place) return;
    float *to = stored + (place->slot * 2 * heads->kv_heads * heads->capacity + place->position) * width;
    for (long head = 0; head < 2 * heads->kv_heads; head++)
        copy_head(to + head * heads->capacity * width, row + queries + head * width, width);
}

void list_tasks(const Heads *heads, Attending attending, long *firsts) {
    firsts[0] = 0;
    for (long i = 0; i < attending.count; i++)
        firsts[i + 1] = firsts[i] + heads->kv_heads * tiles_of(attending.segments[i], heads->heads / heads->kv_heads);
}

/* the segment that a task is of */
static long segment_of(const long *firsts, long count, long task) {
    long i = 0;
    for (long last = count - 1; i < last;) {
        const long middle = (i + last) / 2;
        if (task < firsts[middle + 1])
            last = middle;
        else
            i = middle + 1;
    }
    return i;
}

void attend_segments(const Heads *heads, const float *queries, long query_stride, float *out, const float *stored,
                     Attending attending, const long *firsts) {
    const Segment *segments = attending.segments;
    const long group = heads->heads / heads->kv_heads, count = attending.count;
    /* tasks that a thread takes at a time: one of few queries is hardly longer than taking it */
    const long few = 1 + firsts[count] / (32 * threads_at_most());
#pragma omp for schedule(dynamic, few)
    for (long task = 0; task < firsts[count]; task++) {
        const long i = segment_of(firsts, count, task), tiles = tiles_of(segments[i], group), within = task - firsts[i];
        const long kv_head = within / tiles, tile = within % tiles;
        const int is_last = kv_head + 1 == heads->kv_heads;
        Fetch next = {NULL, NULL, 0};
        if (tile + 1 == tiles && task + 1 < firsts[count])
            next = fetch_of(heads, stored, segments[is_last ? i + 1 : i], attending.views, is_last ? 0 : kv_head + 1);
        attend_task(heads, queries, query_stride, out, stored, segments[i], attending.views, kv_head, tile * TILE,
                    next);
    }
}

/* Packed rows hold queries, and after them keys and values if there are places for them. */
typedef struct {
    float *projected, *out, *stored;
    Rotation rotation;
    const Place *places;
    Attending attending;
    long rows;
    Heads heads;
} AttendCall;

long stepsaver_attend(const AttendCall *c) {
    const Heads *heads = &c->heads;
    const long stride = (heads->heads + (c->places ? 2 * heads->kv_heads : 0)) * heads->head_dim;
    if (c->places && !places_fit(heads, c->places, c->rows)) return OUT_OF_BOUNDS;
    if (!segments_fit(heads, c->attending, c->rows)) return OUT_OF_BOUNDS;
    long *firsts = malloc((size_t)(c->attending.count + 1) * sizeof *firsts);
    if (!firsts) return NO_MEMORY;
    list_tasks(heads, c->attending, firsts);
#pragma omp parallel if (c->attending.count > 0 || c->rows * stride > 4 * MANY)
    {
#pragma omp for
        for (long row = 0; row < c->rows; row++)
            store_row(heads, c->projected + row * stride, c->rotation, row, c->stored,
                      c->places ? c->places + row : NULL);
        attend_segments(heads, c->projected, stride, c->out, c->stored, c->attending, firsts);
    }
    free(firsts);
    return FINE;
}

/* Per row: the index of its largest number but the masked one, that number's share of the exponentials of all, and their
 * plain sum, which is finite if all are. */
static void argmax_row(const float *x, long width, long mask, double *out, long apart) {
    const long before = mask < 0 ? width : mask, behind = mask < 0 ? width : mask + 1;
    float best = rows_of->largest(x, before);
    const float other = rows_of->largest(x + behind, width - behind);
    best = other > best ? other : best;
    const float most = mask >= 0 && x[mask] > best ? x[mask] : best;
    const Sums sums = rows_of->sums_of(x, width, most);
    long index = 0;
    while (index < width - 1 && (x[index] != best || index == mask)) index++;
    out[0] = (double)index;
    out[apart] = (double)(expf(best - most) / sums.exponentials);
    out[2 * apart] = (double)sums.plain;
}

long stepsaver_argmax(const float *logits, double *out, long rows, long width, long mask) {
    if (mask >= width || width < 1) return OUT_OF_BOUNDS;
#pragma omp parallel for
    for (long row = 0; row < rows; row++) argmax_row(logits + row * width, width, mask, out + row, rows);
    return FINE;
}
