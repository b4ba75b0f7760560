/* Consecutive layers of which some rows take what a sublayer adds from the cache, in one call. For small layers.
 *
 * Every sublayer takes the rows that run it, a tile at a time, so that tiles are full however scattered these rows are.
 * Threads meet four times per layer. Every number is the one that the operations by themselves give.
 */
#include <stdlib.h>
#include <string.h>

#include "layer.h"

typedef struct {
    const Call *call;
    float *queries, *mixed; /* of the rows that attend, side by side */
    const long *firsts;
} Work;

static float *row_of(const Call *c, const RowSubset *some, long i) {
    return c->h + (some->rows ? some->rows[i] : i) * c->shape.hidden;
}

static void add_row(float *x, const float *added, long width) {
    for (long j = 0; j < width; j++) x[j] += added[j];
}

static void norm_tile(const Call *c, const RowSubset *some, const float *norm_weight, long first, long count,
                      Scratch scratch) {
    const long hidden = c->shape.hidden;
    for (long i = 0; i < count; i++)
        rms_norm(row_of(c, some, first + i), NULL, norm_weight, scratch.wide + i * hidden, hidden, c->shape.eps);
    pack_tile(scratch.wide, hidden, count, hidden, scratch.packed);
}

/* Adds what a sublayer made of a tile, which lies in `scratch.narrow`, and keeps it. */
static void add_tile(const Call *c, const RowSubset *some, float *kept, long first, long count, Scratch scratch) {
    const long hidden = c->shape.hidden;
    for (long i = 0; i < count; i++) {
        const float *delta = scratch.narrow + i * hidden;
        memcpy(kept + some->deltas[first + i] * hidden, delta, (size_t)hidden * sizeof *kept);
        add_row(row_of(c, some, first + i), delta, hidden);
    }
}

/* Threads do not wait for each other at the end. */
static void add_reused(const Call *c, const RowSubset *some, const float *kept) {
    const long hidden = c->shape.hidden;
#pragma omp for nowait
    for (long i = 0; i < some->count; i++) add_row(row_of(c, some, i), kept + some->deltas[i] * hidden, hidden);
}

static void write_tile(const Work *w, long layer, long first, long count, Scratch scratch) {
    const Call *c = w->call;
    const Weight weight = keys_values_of(&c->shape, c->layers + layer);
    Heads heads = heads_of(c, c->layers + layer);
    heads.heads = 0; /* of these rows, which have no queries here */
    norm_tile(c, &c->written, c->layers[layer].attention_norm, first, count, scratch);
    multiply_tile(&weight, scratch.packed, count, scratch.wide);
    for (long i = 0; i < count; i++)
        store_row(&heads, scratch.wide + i * weight.outputs, c->written_rotation, first + i, stored_of(c, layer),
                  c->places + first + i);
}

static void query_tile(const Work *w, long layer, long first, long count, Scratch scratch) {
    const Call *c = w->call;
    const Weight weight = queries_of(&c->shape, c->layers + layer);
    const Heads heads = heads_of(c, c->layers + layer);
    norm_tile(c, &c->attention, c->layers[layer].attention_norm, first, count, scratch);
    multiply_tile(&weight, scratch.packed, count, w->queries + first * weight.outputs);
    for (long row = first; row < first + count; row++)
        store_row(&heads, w->queries + row * weight.outputs, c->attention_rotation, row, NULL, NULL);
}

static void attention_tile(const Work *w, long layer, long first, long count, Scratch scratch) {
    const Call *c = w->call;
    const Weight weight = output_of(&c->shape, c->layers + layer);
    pack_tile(w->mixed + first * weight.inputs, weight.inputs, count, weight.inputs, scratch.packed);
    multiply_tile(&weight, scratch.packed, count, scratch.narrow);
    add_tile(c, &c->attention, c->deltas[layer].attention, first, count, scratch);
}

static void mlp_tile(const Work *w, long layer, long first, long count, Scratch scratch) {
    const Call *c = w->call;
    norm_tile(c, &c->mlp, c->layers[layer].mlp_norm, first, count, scratch);
    run_mlp(&c->shape, c->layers + layer, count, scratch);
    add_tile(c, &c->mlp, c->deltas[layer].mlp, first, count, scratch);
}

typedef void RunTile(const Work *w, long layer, long first, long count, Scratch scratch);

/* Threads do not wait for each other at the end. */
static void share_tiles(const Work *w, long rows, RunTile *run, long layer, Scratch scratch) {
    const long tiles = count_tiles(rows, threads_at_most());
#pragma omp for schedule(dynamic) nowait
    for (long tile = 0; tile < tiles; tile++) {
        const long first = rows * tile / tiles;
        run(w, layer, first, rows * (tile + 1) / tiles - first, scratch);
    }
}

static void run_layer(const Work *w, long layer, Scratch scratch) {
    const Call *c = w->call;
    const Heads heads = heads_of(c, c->layers + layer);
    share_tiles(w, c->written.count, write_tile, layer, scratch);
    share_tiles(w, c->attention.count, query_tile, layer, scratch);
#pragma omp barrier
    attend_segments(&heads, w->queries, heads.heads * heads.head_dim, w->mixed, stored_of(c, layer), c->attending,
                    w->firsts);
    add_reused(c, &c->attention_reused, c->deltas[layer].attention);
    share_tiles(w, c->attention.count, attention_tile, layer, scratch);
#pragma omp barrier
    add_reused(c, &c->mlp_reused, c->deltas[layer].mlp);
    share_tiles(w, c->mlp.count, mlp_tile, layer, scratch);
#pragma omp barrier
}

/* Every layer has deltas. */
long stepsaver_run_reused_layers(const Call *call) {
    const Shape *s = &call->shape;
    const long mixed = s->heads * s->head_dim, inputs = most(most(s->hidden, mixed), s->mlp);
    const long attending = call->attention.count, threads = threads_at_most();
    const long narrow = MOST_TILE * most(s->hidden, s->mlp);
    const long wide = MOST_TILE * most(most(s->hidden, 2 * s->mlp), qkv_width(s));
    const long packed = MOST_TILE * inputs + PACKING_ROOM, each = (narrow + wide + packed + 15) / 16 * 16;
    const RowSubset *reusing[] = {&call->attention, &call->mlp, &call->attention_reused, &call->mlp_reused};
    int fit = fits(call) && call->deltas != NULL;
    for (int i = 0; i < 4; i++) fit = fit && (reusing[i]->deltas || !reusing[i]->count);
    if (!fit) return OUT_OF_BOUNDS;
    float *memory = malloc((size_t)(2 * attending * mixed + threads * each) * sizeof *memory);
    long *firsts = malloc((size_t)(call->attending.count + 1) * sizeof *firsts);
    if (!memory || !firsts) {
        free(memory);
        free(firsts);
        return NO_MEMORY;
    }
    const Work work = {call, memory, memory + attending * mixed, firsts};
    const Heads any = heads_of(call, call->layers);
    list_tasks(&any, call->attending, firsts);
#pragma omp parallel
    {
        float *own = memory + 2 * attending * mixed + thread_number() * each;
        for (long i = 0; i < call->count; i++)
            run_layer(&work, i, (Scratch){own, own + packed, own + packed + wide});
    }
    free(memory);
    free(firsts);
    return FINE;
}
