/* Consecutive layers in one call.
 *
 * Where weights stay in the processor's caches, a layer takes less time than the calls of its operations. There a few
 * rows at a time, a tile, go from one layer's mixed values to the next layer's keys and values, so that threads meet
 * twice per layer: before rows attend, and after. Large weights are read once, by all threads together: they share every
 * product, and meet after each. Either way every number is the one that the operations by themselves give.
 */
#include <stdlib.h>
#include <string.h>

#include "layer.h"

typedef struct {
    const Shape *shape;
    float *h, *projected, *mixed;
    const float *rotation;
    const int64_t *indices;
    const int64_t *delta_indices; /* the rows of the deltas that are kept of each, or NULL */
    float floor_squared, eps;
} Rows;

/* Adds what the layer before made of the rows, if there is one, and writes their queries, keys and values. */
static void project_tile(const Rows *r, const Layer *layer, float *stored, long first, long count, const float *added,
                         Scratch scratch) {
    const Shape *s = r->shape;
    const long width = qkv_width(s), hidden = s->hidden;
    const Heads heads = heads_of(s, layer, r->eps);
    const Map qkv = qkv_of(s, layer);
    for (long i = 0; i < count; i++)
        scale_row(r->h + (first + i) * hidden, added ? added + i * hidden : NULL, layer->attention_columns,
                  scratch.wide + i * hidden, hidden, r->floor_squared);
    pack_tile(scratch.wide, hidden, count, hidden, scratch.packed);
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
    const long mixed = s->heads * s->head_dim, hidden = s->hidden;
    const Map output = output_of(s, layer);
    pack_tile(r->mixed + first * mixed, mixed, count, mixed, scratch.packed);
    multiply_tile(&output, scratch.packed, count, scratch.narrow);
    keep_deltas(r, kept.attention, scratch.narrow, first, count);
    for (long i = 0; i < count; i++)
        scale_row(r->h + (first + i) * hidden, scratch.narrow + i * hidden, layer->mlp_columns,
                  scratch.wide + i * hidden, hidden, r->floor_squared);
    pack_tile(scratch.wide, hidden, count, hidden, scratch.packed);
    run_mlp(s, layer, count, scratch);
    keep_deltas(r, kept.mlp, scratch.narrow, first, count);
}

/* What all threads share where weights are large: packed rows, what a map makes of them, what a part adds to them, and
 * a count of the blocks that are taken for each product. */
typedef struct {
    float *packed, *wide, *added;
    long *taken;
} Shared;

/* Adds to the rows what a part made of them, unless it is NULL, keeps that, and packs the scaled rows. */
static void scale_shared(const Rows *r, long rows, const float *columns, const float *added, float *kept,
                         const Shared *shared) {
    const long hidden = r->shape->hidden, together = rows_of_pass(rows);
#pragma omp for
    for (long first = 0; first < rows; first += together) {
        const long last = first + together < rows ? first + together : rows;
        if (added) keep_deltas(r, kept, added + first * hidden, first, last - first);
        for (long row = first; row < last; row++)
            scale_row(r->h + row * hidden, added ? added + row * hidden : NULL, columns, shared->wide + row * hidden,
                      hidden, r->floor_squared);
        pack_pass(shared->wide, hidden, rows, hidden, first / together, shared->packed);
    }
}

static void project_shared(const Rows *r, long rows, const Layer *layer, float *stored, const float *added, float *kept,
                           Shared *shared) {
    const Shape *s = r->shape;
    const long width = qkv_width(s);
    const Heads heads = heads_of(s, layer, r->eps);
    const Map qkv = qkv_of(s, layer);
    scale_shared(r, rows, layer->attention_columns, added, kept, shared);
    multiply_shared(&qkv, shared->packed, rows, r->projected, shared->taken++);
#pragma omp for
    for (long row = 0; row < rows; row++)
        store_row(&heads, r->projected + row * width, r->rotation + row * 2 * s->head_dim, stored, r->indices + row);
}

/* From the mixed values to what the MLP adds, which is left in `shared->added`. */
static void finish_shared(const Rows *r, long rows, const Layer *layer, float *kept, Shared *shared) {
    const Shape *s = r->shape;
    const long mixed = s->heads * s->head_dim, mlp = s->mlp, together = rows_of_pass(rows);
    const Map output = output_of(s, layer), gate_up = gate_up_of(s, layer), down = down_of(s, layer);
#pragma omp for
    for (long first = 0; first < rows; first += together)
        pack_pass(r->mixed, mixed, rows, mixed, first / together, shared->packed);
    multiply_shared(&output, shared->packed, rows, shared->added, shared->taken++);
    scale_shared(r, rows, layer->mlp_columns, shared->added, kept, shared);
    multiply_shared(&gate_up, shared->packed, rows, shared->wide, shared->taken++);
#pragma omp for
    for (long first = 0; first < rows; first += together) {
        const long last = first + together < rows ? first + together : rows;
        for (long row = first; row < last; row++) /* in place: the gate is not needed any more */
            silu_product_row(shared->wide + row * 2 * mlp, shared->wide + row * 2 * mlp, mlp);
        pack_pass(shared->wide, 2 * mlp, rows, mlp, first / together, shared->packed);
    }
    multiply_shared(&down, shared->packed, rows, shared->added, shared->taken++);
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

/* What a call runs on. */
typedef struct {
    const Layer *layers;
    const Deltas *deltas; /* of each layer, or NULL */
    const Segment *segments;
    float *stored;
    long count, segment_count, layer_apart; /* of layers and of segments; from a layer's cache to the next one's */
    long *firsts;
} Call;

static Deltas deltas_of(const Call *call, long layer) {
    return call->deltas ? call->deltas[layer] : (Deltas){NULL, NULL};
}

/* `on` are the rows that go on, which are those of `r` unless some are kept. */
static void attend(const Call *call, const Rows *on, const Kept *kept, long layer) {
    const Shape *s = on->shape;
    const Heads heads = heads_of(s, call->layers + layer, on->eps);
    attend_segments(&heads, kept->rows ? kept->queries : on->projected,
                    kept->rows ? s->heads * s->head_dim : qkv_width(s), on->mixed,
                    call->stored + layer * call->layer_apart, call->segments, call->firsts, call->segment_count);
}

static void run_tiles(const Call *call, const Rows *r, long rows, const Rows *on, long going, const Kept *kept,
                      Scratch scratch) {
    const long threads = threads_at_most(), hidden = r->shape->hidden;
    const long tiles = count_tiles(rows, threads), going_tiles = count_tiles(going, threads);
#pragma omp for schedule(dynamic)
    for (long tile = 0; tile < tiles; tile++) {
        const long first = rows * tile / tiles, last = rows * (tile + 1) / tiles;
        project_tile(r, call->layers, call->stored, first, last - first, NULL, scratch);
    }
#pragma omp for
    for (long i = 0; i < kept->count; i++) keep_row(r, kept, i);
    for (long i = 0; i < call->count; i++) {
        attend(call, on, kept, i);
#pragma omp for schedule(dynamic)
        for (long tile = 0; tile < going_tiles; tile++) {
            const long first = going * tile / going_tiles, some = going * (tile + 1) / going_tiles - first;
            finish_tile(on, call->layers + i, deltas_of(call, i), first, some, scratch);
            if (i + 1 < call->count)
                project_tile(on, call->layers + i + 1, call->stored + (i + 1) * call->layer_apart, first, some,
                             scratch.narrow, scratch);
            else
                for (long j = 0; j < some * hidden; j++) on->h[first * hidden + j] += scratch.narrow[j];
        }
    }
}

static void run_shared(const Call *call, const Rows *r, long rows, const Rows *on, long going, const Kept *kept,
                       Shared shared) {
    const long hidden = r->shape->hidden;
    project_shared(r, rows, call->layers, call->stored, NULL, NULL, &shared);
#pragma omp for
    for (long i = 0; i < kept->count; i++) keep_row(r, kept, i);
    for (long i = 0; i < call->count; i++) {
        const Deltas deltas = deltas_of(call, i);
        attend(call, on, kept, i);
        finish_shared(on, going, call->layers + i, deltas.attention, &shared);
        if (i + 1 < call->count) {
            project_shared(on, going, call->layers + i + 1, call->stored + (i + 1) * call->layer_apart, shared.added,
                           deltas.mlp, &shared);
            continue;
        }
#pragma omp for
        for (long row = 0; row < going; row++) {
            keep_deltas(on, deltas.mlp, shared.added + row * hidden, row, 1);
            for (long j = row * hidden; j < (row + 1) * hidden; j++) on->h[j] += shared.added[j];
        }
    }
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
    const long inputs = most(most(hidden, mixed), shape->mlp), is_large = shape->is_large;
    const long many = is_large ? rows : MOST_TILE; /* rows that are between two maps at a time */
    const long narrow = many * most(hidden, is_large ? 0 : shape->mlp), wide = many * most(hidden, 2 * shape->mlp);
    const long packed = is_large ? packed_size(rows, inputs) : MOST_TILE * inputs + PACKING_ROOM;
    const long each = (narrow + wide + packed + 15) / 16 * 16, threads = is_large ? 1 : threads_at_most();
    const long going = kept_rows ? kept_count : rows, lasting = rows * (width + mixed) + kept_count * mixed;
    float *memory = malloc((size_t)(lasting + threads * each) * sizeof *memory);
    long *firsts = calloc((size_t)(segment_count + 1 + 4 * count), sizeof *firsts);
    if (!memory || !firsts) {
        free(memory);
        free(firsts);
        return 0;
    }
    const Rows r = {shape, h, memory, memory + rows * width, rotation, indices, delta_indices, floor_squared, eps};
    const Kept kept = {kept_rows, kept_h, memory + rows * (width + mixed), kept_count};
    const Call call = {layers, deltas, segments, stored, count, segment_count, layer_apart, firsts};
    const Heads any = heads_of(shape, layers, eps);
    Rows on = r;
    if (kept_rows) on.h = kept_h;
    list_tasks(&any, segments, segment_count, firsts);
#pragma omp parallel if (is_large || count_tiles(rows, threads) > 1 || segment_count > 1)
    {
        float *own = memory + lasting + (is_large ? 0 : thread_number()) * each;
        if (is_large)
            run_shared(&call, &r, rows, &on, going, &kept,
                       (Shared){own, own + packed, own + packed + wide, firsts + segment_count + 1});
        else
            run_tiles(&call, &r, rows, &on, going, &kept, (Scratch){own, own + packed, own + packed + wide});
    }
    free(memory);
    free(firsts);
    return 1;
}
