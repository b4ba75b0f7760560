/* What the sources share: the work on one row or on a few, which `layers.c` and `reused_layers.c` put together to whole layers. */
#ifndef STEPSAVER_PARTS
#define STEPSAVER_PARTS

#include <stdint.h>

#pragma GCC visibility push(hidden)

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define PACKING_ROOM 16
#define MOST_TILE 14 /* rows of a tile, at most: on any processor they fill the registers */

/* One sample's part of the packed queries: rows start to stop - 1. */
typedef struct {
    int64_t start, stop, slot;
} Segment;

/* What a query sees of its slot: the first `seen` places, but not those from `gap` to `resume` - 1. */
typedef struct {
    int64_t seen, gap, resume;
} View;

/* How packed queries attend: the samples' parts of them, and what each query sees. */
typedef struct {
    const Segment *segments;
    const View *views;
    long count; /* of segments */
} Attending;

/* Where a row's keys and values go. */
typedef struct {
    int64_t slot, position;
} Place;

/* Of packed rows: cosines and signed sines, 2 head_dim numbers each, and what queries are multiplied by, or NULL. */
typedef struct {
    const float *turns, *query_scale;
} Rotation;

/* The heads of a layer and its cache; `norms` is a factor per column of a head's queries, then of its keys, or NULL. */
typedef struct {
    long heads, kv_heads, head_dim, slots, capacity;
    const float *norms;
    float eps;
} Heads;

/* The weight of a linear map. It lies in blocks (multiply.c), either as halves or as floats. */
typedef struct {
    const uint16_t *halves;
    const float *floats;
    const float *bias; /* or NULL */
    long inputs, outputs;
} Weight;

/* What a call from Python returns. Nothing has changed unless it is FINE. */
enum { FINE, NO_MEMORY, OUT_OF_BOUNDS };

/* Whether all of some indices are below a limit; whether places are in the cache; whether segments are of so many rows,
 * and see no more than there is in the cache and than attention keeps the scores of. */
int are_below(const int64_t *indices, long count, long limit);
int places_fit(const Heads *heads, const Place *places, long count);
int segments_fit(const Heads *heads, Attending attending, long rows);

/* A row's root-mean-square norm, times `norm_weight`. `pending`, unless NULL, is added to the row first, in place. */
void rms_norm(float *x, const float *pending, const float *norm_weight, float *out, long width, float eps);

/* silu(gate) * up, of a row that holds first the gate and then up, `width` numbers each */
void silu_product_row(const float *gate_up, float *out, long width);

/* Norms and turns a projected row in place, its queries and its keys if it has any, and puts keys and values where they
 * belong, unless `place` is NULL. `n` is the row's number in the rotation. */
void store_row(const Heads *heads, float *row, Rotation rotation, long n, float *stored, const Place *place);

/* Into `firsts`, which has room for one more than there are segments: the tasks of the segments before each one. */
void list_tasks(const Heads *heads, Attending attending, long *firsts);

/* Softmax attention of all segments. Threads of a parallel region share the tasks, and wait for each other at the end. */
void attend_segments(const Heads *heads, const float *queries, long query_stride, float *out, const float *stored,
                     Attending attending, const long *firsts);

/* Rows, which lie `apart` numbers apart, side by side, input after input; needs room for PACKING_ROOM numbers more. */
void pack_tile(const float *x, long apart, long rows, long inputs, float *packed);

/* At most MOST_TILE packed rows times a weight. The numbers are those of `stepsaver_multiply`. */
void multiply_tile(const Weight *weight, const float *packed, long rows, float *out);

/* Rows that are multiplied together, of so many; their passes, packed one after another, need so much room. */
long rows_of_pass(long rows);
long packed_size(long rows, long inputs);
void pack_pass(const float *x, long apart, long rows, long inputs, long pass, float *packed);

/* Packed passes times a weight. Threads of a parallel region share its blocks, and wait for each other at the end. `taken`
 * counts the blocks, from 0. */
void multiply_shared(const Weight *weight, const float *packed, long rows, float *out, long *taken);

/* threads of the next parallel region, at most */
long threads_at_most(void);

/* rows that a tile should have, at most */
long most_rows_of_tile(void);

#pragma GCC visibility pop
#endif
