/* Consecutive layers of which some rows take what a part adds from the cache, in one call. For small layers.
 *
 * Every part takes the rows that run it, a tile at a time, so that tiles are full however scattered these rows are.
 * Threads meet four times per layer. Every number is the one that the operations by themselves give.
 */
#include <stdlib.h>
#include <string.h>

#include "layer.h"

/* Some of the packed rows, or all if `rows` is NULL, and where in a part's deltas each one's is kept. */
typedef struct {
    const int64_t *rows, *deltas;
    long count;
} Subset;

/* Which rows write keys and values, attend, and run the MLP; and which take from the cache what these two parts add. */
typedef struct {
    Subset written, attention, mlp, attention_reused, mlp_reused;
} Parts;

typedef struct {
    const Shape *shape;
    const Parts *parts;
    float *h, *queries, *mixed; /* the latter two of the rows that attend, side by side */
    const float *written_rotation, *attention_rotation;
    const int64_t *indices; /* where the rows that write keys and values put them */
    const Segment *segments;
    long *firsts;
    long segment_count;
    float floor_squared, eps;
} Work;

static float *row_of(const Work *w, const Subset *some, long i) {
    return w->h + (some->rows ? some->rows[i] : i) * w->shape->hidden;
}

static void add_row(float *x, const float *added, long width) {
    for (long j = 0; j < width; j++) x[j] += added[j];
}

static void scale_tile(const Work *w, const Subset *some, const float *columns, long first, long count,
                       Scratch scratch) {
    const long hidden = w->shape->hidden;
    for (long i = 0; i < count; i++)
        scale_row(row_of(w, some, first + i), NULL, columns, scratch.wide + i * hidden, hidden, w->floor_squared);
    pack_tile(scratch.wide, hidden, count, hidden, scratch.packed);
}

/* Adds what a part made of a tile, which lies in `scratch.narrow`, and keeps it. */
static void add_tile(const Work *w, const Subset *some, float *kept, long first, long count, Scratch scratch) {
    const long hidden = w->shape->hidden;
    for (long i = 0; i < count; i++) {
        const float *added = scratch.narrow + i * hidden;
        if (kept) memcpy(kept + some->deltas[first + i] * hidden, added, (size_t)hidden * sizeof *kept);
        add_row(row_of(w, some, first + i), added, hidden);
    }
}

/* Threads do not wait for each other at the end. */
static void add_reused(const Work *w, const Subset *some, const float *kept) {
    const long hidden = w->shape->hidden;
#pragma omp for nowait
    for (long i = 0; i < some->count; i++) add_row(row_of(w, some, i), kept + some->deltas[i] * hidden, hidden);
}

static void write_tile(const Work *w, const Layer *layer, float *stored, long first, long count, Scratch scratch) {
    const Shape *s = w->shape;
    const Map map = keys_values_of(s, layer);
    Heads heads = heads_of(s, layer, w->eps);
    heads.heads = 0; /* of these rows, which have no queries here */
    scale_tile(w, &w->parts->written, layer->attention_columns, first, count, scratch);
    multiply_tile(&map, scratch.packed, count, scratch.wide);
    for (long i = 0; i < count; i++)
        store_row(&heads, scratch.wide + i * map.outputs, w->written_rotation + (first + i) * 2 * s->head_dim, stored,
                  w->indices + first + i);
}

static void query_tile(const Work *w, const Layer *layer, float *stored, long first, long count, Scratch scratch) {
    const Shape *s = w->shape;
    const Map map = queries_of(s, layer);
    const Heads heads = heads_of(s, layer, w->eps);
    scale_tile(w, &w->parts->attention, layer->attention_columns, first, count, scratch);
    multiply_tile(&map, scratch.packed, count, w->queries + first * map.outputs);
    for (long row = first; row < first + count; row++)
        store_row(&heads, w->queries + row * map.outputs, w->attention_rotation + row * 2 * s->head_dim, stored, NULL);
}

static void attention_tile(const Work *w, const Layer *layer, float *kept, long first, long count, Scratch scratch) {
    const Map map = output_of(w->shape, layer);
    pack_tile(w->mixed + first * map.inputs, map.inputs, count, map.inputs, scratch.packed);
    multiply_tile(&map, scratch.packed, count, scratch.narrow);
    add_tile(w, &w->parts->attention, kept, first, count, scratch);
}

static void mlp_tile(const Work *w, const Layer *layer, float *kept, long first, long count, Scratch scratch) {
    const Subset *some = &w->parts->mlp;
    scale_tile(w, some, layer->mlp_columns, first, count, scratch);
    run_mlp(w->shape, layer, count, scratch);
    add_tile(w, some, kept, first, count, scratch);
}

typedef void RunTile(const Work *w, const Layer *layer, float *where, long first, long count, Scratch scratch);

/* Threads do not wait for each other at the end. */
static void share_tiles(const Work *w, long rows, RunTile *run, const Layer *layer, float *where, Scratch scratch) {
    const long tiles = count_tiles(rows, threads_at_most());
#pragma omp for schedule(dynamic) nowait
    for (long tile = 0; tile < tiles; tile++) {
        const long first = rows * tile / tiles;
        run(w, layer, where, first, rows * (tile + 1) / tiles - first, scratch);
    }
}

static void run_parts(const Work *w, const Layer *layer, Deltas deltas, float *stored, Scratch scratch) {
    const Shape *s = w->shape;
    const Parts *parts = w->parts;
    const Heads heads = heads_of(s, layer, w->eps);
    share_tiles(w, parts->written.count, write_tile, layer, stored, scratch);
    share_tiles(w, parts->attention.count, query_tile, layer, stored, scratch);
#pragma omp barrier
    attend_segments(&heads, w->queries, s->heads * s->head_dim, w->mixed, stored, w->segments, w->firsts,
                    w->segment_count);
    add_reused(w, &parts->attention_reused, deltas.attention);
    share_tiles(w, parts->attention.count, attention_tile, layer, deltas.attention, scratch);
#pragma omp barrier
    add_reused(w, &parts->mlp_reused, deltas.mlp);
    share_tiles(w, parts->mlp.count, mlp_tile, layer, deltas.mlp, scratch);
#pragma omp barrier
}

/* Runs packed rows, whose hidden states change in place, through `count` layers, each with its deltas. A layer's cache
 * lies `layer_apart` numbers after that of the one before. Returns whether there was memory for it. */
long stepsaver_run_reused_layers(const Layer *layers, const Shape *shape, const Parts *parts, float *h,
                                 const float *written_rotation, const float *attention_rotation, float *stored,
                                 const int64_t *indices, const Segment *segments, const Deltas *deltas, long count,
                                 long segment_count, long layer_apart, float floor_squared, float eps) {
    const long mixed = shape->heads * shape->head_dim, inputs = most(most(shape->hidden, mixed), shape->mlp);
    const long attending = parts->attention.count, threads = threads_at_most();
    const long narrow = MOST_TILE * most(shape->hidden, shape->mlp);
    const long wide = MOST_TILE * most(most(shape->hidden, 2 * shape->mlp), qkv_width(shape));
    const long packed = MOST_TILE * inputs + PACKING_ROOM, each = (narrow + wide + packed + 15) / 16 * 16;
    float *memory = malloc((size_t)(2 * attending * mixed + threads * each) * sizeof *memory);
    long *firsts = malloc((size_t)(segment_count + 1) * sizeof *firsts);
    if (!memory || !firsts) {
        free(memory);
        free(firsts);
        return 0;
    }
    const Work work = {shape,    parts,    h,      memory,        memory + attending * mixed, written_rotation,
                       attention_rotation, indices, segments, firsts, segment_count, floor_squared, eps};
    const Heads any = heads_of(shape, layers, eps);
    list_tasks(&any, segments, segment_count, firsts);
#pragma omp parallel
    {
        float *own = memory + 2 * attending * mixed + thread_number() * each;
        for (long i = 0; i < count; i++)
            run_parts(&work, layers + i, deltas[i], stored + i * layer_apart,
                      (Scratch){own, own + packed, own + packed + wide});
    }
    free(memory);
    free(firsts);
    return 1;
}
