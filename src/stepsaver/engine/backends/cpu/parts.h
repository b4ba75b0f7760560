/* What the sources share: the work on one row or on a few, which `layers.c` puts together to whole layers. */
#ifndef STEPSAVER_PARTS
#define STEPSAVER_PARTS

#include <stdint.h>

#pragma GCC visibility push(hidden)

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define PACKING_ROOM 16
#define MOST_TILE 14 /* rows of a tile, at most: on any processor they fill the registers */

/* One sample's part of the packed queries: row start sees the first `length` rows of a slot, each row up to stop - 1
 * `growth` more than the one before it. */
typedef struct {
    int64_t start, stop, slot, length, growth;
} Segment;

/* The heads of a layer and its cache; `norms` is a factor per column of a head's queries, then of its keys, or NULL. */
typedef struct {
    long heads, kv_heads, head_dim, capacity;
    const float *norms;
    float eps;
} Heads;

/* A linear map. Its weights lie in blocks (multiply.c), either as halves or as floats. */
typedef struct {
    const uint16_t *halves;
    const float *floats;
    const float *bias; /* or NULL */
    long inputs, outputs;
} Map;

/* A row divided by the square root of the sum of its squares and `floor_squared`, times `columns` unless that is NULL.
 * `added`, unless NULL, is added to the row first, in place. */
void scale_row(float *x, const float *added, const float *columns, float *out, long width, float floor_squared);

/* silu(gate) * up, of a row that holds first the gate and then up, `width` numbers each */
void silu_product_row(const float *gate_up, float *out, long width);

/* Norms and turns a projected row in place, its queries and its keys if it has any, and puts keys and values where they
 * belong. `index`, unless NULL: where its first head goes. */
void store_row(const Heads *heads, float *row, const float *rotation, float *stored, const int64_t *index);

/* Into `firsts`, which has room for one more than there are segments: the tasks of the segments before each one. */
void list_tasks(const Heads *heads, const Segment *segments, long count, long *firsts);

/* Softmax attention of all segments. Threads of a parallel region share the tasks, and wait for each other at the end. */
void attend_segments(const Heads *heads, const float *queries, long query_stride, float *out, const float *stored,
                     const Segment *segments, const long *firsts, long count);

/* Rows, which lie `apart` numbers apart, side by side, input after input; needs room for PACKING_ROOM numbers more. */
void pack_tile(const float *x, long apart, long rows, long inputs, float *packed);

/* At most MOST_TILE packed rows times a map. The numbers are those of `stepsaver_multiply`. */
void multiply_tile(const Map *map, const float *packed, long rows, float *out);

/* Rows that are multiplied together, of so many; their passes, packed one after another, need so much room. */
long rows_of_pass(long rows);
long packed_size(long rows, long inputs);
void pack_pass(const float *x, long apart, long rows, long inputs, long pass, float *packed);

/* Packed passes times a map. Threads of a parallel region share its blocks, and wait for each other at the end. `taken`
 * counts the blocks, from 0. */
void multiply_shared(const Map *map, const float *packed, long rows, float *out, long *taken);

/* threads of the next parallel region, at most */
long threads_at_most(void);

/* rows that a tile should have, at most */
long most_rows_of_tile(void);

#pragma GCC visibility pop
#endif
