/* Consecutive layers in one call.
 *
 * Where weights stay in the processor's caches, a layer takes less time than the calls of its operations. Here a few
 * rows at a time, a tile, go from one layer's mixed values to the next layer's keys and values, so that threads meet
 * twice per layer: before rows attend, and after. Every number is the one that the operations by themselves give.
 */
#include <stdlib.h>
#include <string.h>

#include "parts.h"

#ifdef _OPENMP
#include <omp.h>
#endif

/* A layer as Python describes it (kernels/layers.py): addresses, 0 where there is nothing. */
typedef struct {
    const void *qkv, *qkv_bias, *output, *output_bias, *gate_up, *gate_up_bias, *down, *down_bias;
    const float *attention_columns, *mlp_columns, *norms;
} Layer;

/* Where a layer keeps what its parts add, or NULL. */
typedef struct {
    float *attention, *mlp;
} Deltas;

typedef struct {
    long heads, kv_heads, head_dim, capacity, hidden, mlp, kind;
} Shape;

typedef struct {
    const Shape *shape;
    float *h, *projected, *mixed;
    const float *rotation;
    const int64_t *indices;
    const int64_t *delta_indices; /* the rows of the deltas that are kept of each, or NULL */
    float floor_squared, eps;
} Rows;

/* what a thread keeps between two maps: packed rows, what a map makes of them, and a row's part of it */
typedef struct {
    float *packed, *wide, *narrow;
} Scratch;

static Map map_of(const void *weights, const void *bias, long kind, long inputs, long outputs) {
    return (Map){kind == 0 ? weights : NULL, kind == 2 ? weights : NULL, bias, inputs, outputs};
}

static long qkv_width(const Shape *s) { return (s->heads + 2 * s->kv_heads) * s->head_dim; }

static Heads heads_of(const Shape *s, const Layer *layer, float eps) {
    return (Heads){s->heads, s->kv_heads, s->head_dim, s->capacity, layer->norms, eps};
}

/* Adds what the layer before made of the rows, if there is one, and writes their queries, keys and values. */
static void project_tile(const Rows *r, const Layer *layer, float *stored, long first, long count, const float *added,
                         Scratch scratch) {
    const Shape *s = r->shape;
    const long width = qkv_width(s), hidden = s->hidden;
    const Heads heads = heads_of(s, layer, r->eps);
    const Map qkv = map_of(layer->qkv, layer->qkv_bias, s->kind, hidden, width);
    for (long i = 0; i < count; i++)
        scale_row(r->h + (first + i) * hidden, added ? added + i * hidden : NULL, layer->attention_columns,
                  scratch.wide + i * hidden, hidden, r->floor_squared);
    pack_tile(scratch.wide, count, hidden, scratch.packed);
    multiply_tile(&qkv, scratch.packed, count, r->projected + first * width);
    for (long row = first; row < first + count; row++)
        store_row(&heads, r->projected + row * width, r->rotation + row * 2 * s->head_dim, stored, r->indices + row);
}

static void keep_deltas(const Rows *r, float *kept, const float *added, long first, long count) {
    const long hidden = r->shape->hidden;
    for (long i = 0; kept && i < count; i++)
        memcpy(kept + r->delta_indices[first + i] * hidden, added + i * hidden, (size_t)hidden * sizeof *kept);
}

/* From the mixed values to what the MLP adds, which is left in `scratch.narrow`. */
static void finish_tile(const Rows *r, const Layer *layer, Deltas kept, long first, long count, Scratch scratch) {
    const Shape *s = r->shape;
    const long mixed = s->heads * s->head_dim, hidden = s->hidden, mlp = s->mlp;
    const Map output = map_of(layer->output, layer->output_bias, s->kind, mixed, hidden);
    const Map gate_up = map_of(layer->gate_up, layer->gate_up_bias, s->kind, hidden, 2 * mlp);
    const Map down = map_of(layer->down, layer->down_bias, s->kind, mlp, hidden);
    pack_tile(r->mixed + first * mixed, count, mixed, scratch.packed);
    multiply_tile(&output, scratch.packed, count, scratch.narrow);
    keep_deltas(r, kept.attention, scratch.narrow, first, count);
    for (long i = 0; i < count; i++)
        scale_row(r->h + (first + i) * hidden, scratch.narrow + i * hidden, layer->mlp_columns,
                  scratch.wide + i * hidden, hidden, r->floor_squared);
    pack_tile(scratch.wide, count, hidden, scratch.packed);
    multiply_tile(&gate_up, scratch.packed, count, scratch.wide);
    for (long i = 0; i < count; i++) silu_product_row(scratch.wide + i * 2 * mlp, scratch.narrow + i * mlp, mlp);
    pack_tile(scratch.narrow, count, mlp, scratch.packed);
    multiply_tile(&down, scratch.packed, count, scratch.narrow);
    keep_deltas(r, kept.mlp, scratch.narrow, first, count);
}

static long most(long a, long b) { return a > b ? a : b; }

/* Tiles of about as many rows each, and as many for one thread as for another. */
static long count_tiles(long rows, long threads) {
    const long least = (rows + most_rows_of_tile() - 1) / most_rows_of_tile();
    const long tiles = (least + threads - 1) / threads * threads;
    return tiles < rows ? tiles : rows;
}

/* The rows that go on after a layer's keys and values: their queries lie side by side, and their hidden states apart. */
typedef struct {
    const int64_t *rows;
    float *h, *queries;
    long count;
} Kept;

static void keep_row(const Rows *r, const Kept *kept, long i) {
    const long row = kept->rows[i], hidden = r->shape->hidden, mixed = r->shape->heads * r->shape->head_dim;
    memcpy(kept->h + i * hidden, r->h + row * hidden, (size_t)hidden * sizeof(float));
    memcpy(kept->queries + i * mixed, r->projected + row * qkv_width(r->shape), (size_t)mixed * sizeof(float));
}

static long thread_number(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* Runs `rows` packed rows, whose hidden states change in place, through `count` layers. A layer's cache lies
 * `layer_apart` numbers after that of the one before. `deltas` are those of each layer, or NULL. With `kept_rows`, whose
 * hidden states come to `kept_h`, only those rows go on after the keys and values of a single layer, and the segments are
 * of them. Returns whether there was memory for it. */
long stepsaver_run_layers(const Layer *layers, const Shape *shape, float *h, const float *rotation, float *stored,
                          const int64_t *indices, const Segment *segments, const Deltas *deltas,
                          const int64_t *delta_indices, const int64_t *kept_rows, float *kept_h, long kept_count,
                          long count, long rows, long segment_count, long layer_apart, float floor_squared, float eps) {
    const long hidden = shape->hidden, mixed = shape->heads * shape->head_dim, width = qkv_width(shape);
    const long narrow = MOST_TILE * most(hidden, shape->mlp), wide = MOST_TILE * most(hidden, 2 * shape->mlp);
    const long packed = MOST_TILE * most(most(hidden, mixed), shape->mlp) + PACKING_ROOM;
    const long each = (narrow + wide + packed + 15) / 16 * 16, threads = threads_at_most();
    const long tiles = count_tiles(rows, threads), going = kept_rows ? kept_count : rows;
    const long going_tiles = count_tiles(going, threads), shared = rows * (width + mixed) + kept_count * mixed;
    float *memory = malloc((size_t)(shared + threads * each) * sizeof *memory);
    long *firsts = malloc((size_t)(segment_count + 1) * sizeof *firsts);
    if (!memory || !firsts) {
        free(memory);
        free(firsts);
        return 0;
    }
    const Rows r = {shape, h, memory, memory + rows * width, rotation, indices, delta_indices, floor_squared, eps};
    const Kept kept = {kept_rows, kept_h, memory + rows * (width + mixed), kept_count};
    Rows on = r; /* the rows that go on */
    if (kept_rows) on.h = kept_h;
    const float *queries = kept_rows ? kept.queries : r.projected;
    const Heads any = heads_of(shape, layers, eps);
    list_tasks(&any, segments, segment_count, firsts);
#pragma omp parallel if (tiles > 1 || segment_count > 1)
    {
        float *own = memory + shared + thread_number() * each;
        const Scratch scratch = {own, own + packed, own + packed + wide};
#pragma omp for schedule(dynamic)
        for (long tile = 0; tile < tiles; tile++) {
            const long first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
            project_tile(&r, layers, stored, first, last - first, NULL, scratch);
        }
#pragma omp for
        for (long i = 0; i < kept_count; i++) keep_row(&r, &kept, i);
        for (long i = 0; i < count; i++) {
            const Heads heads = heads_of(shape, layers + i, eps);
            attend_segments(&heads, queries, kept_rows ? mixed : width, on.mixed, stored + i * layer_apart, segments,
                            firsts, segment_count);
#pragma omp for schedule(dynamic)
            for (long tile = 0; tile < going_tiles; tile++) {
                const long first = going * tile / going_tiles, some = going * (tile + 1) / going_tiles - first;
                finish_tile(&on, layers + i, deltas ? deltas[i] : (Deltas){NULL, NULL}, first, some, scratch);
                if (i + 1 < count)
                    project_tile(&on, layers + i + 1, stored + (i + 1) * layer_apart, first, some, scratch.narrow,
                                 scratch);
                else
                    for (long j = 0; j < some * hidden; j++) on.h[first * hidden + j] += scratch.narrow[j];
            }
        }
    }
    free(memory);
    free(firsts);
    return 1;
}
