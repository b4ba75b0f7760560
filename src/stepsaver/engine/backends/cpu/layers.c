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

/* Rows between two layers: all of a call, or those that go on after the keys and values of its only layer. */
typedef struct {
    const Call *call;
    float *h, *projected, *mixed;
    long count;
} Rows;

/* Adds what the layer before made of the rows, if there is one, and writes their queries, keys and values. */
static void project_tile(const Rows *r, long layer, long first, long count, const float *pending, Scratch scratch) {
    const Shape *s = &r->call->shape;
    const Layer *of = r->call->layers + layer;
    const long width = qkv_width(s), hidden = s->hidden;
    const Heads heads = heads_of(r->call, of);
    const Weight qkv = qkv_of(s, of);
    for (long i = 0; i < count; i++)
        rms_norm(r->h + (first + i) * hidden, pending ? pending + i * hidden : NULL, of->attention_norm,
                 scratch.wide + i * hidden, hidden, s->eps);
    pack_tile(scratch.wide, hidden, count, hidden, scratch.packed);
    multiply_tile(&qkv, scratch.packed, count, r->projected + first * width);
    for (long row = first; row < first + count; row++)
        store_row(&heads, r->projected + row * width, r->call->written_rotation, row, stored_of(r->call, layer),
                  r->call->places + row);
}

static void keep_deltas(const Rows *r, float *kept, const float *delta, long first, long count) {
    const long hidden = r->call->shape.hidden;
    for (long i = 0; kept && i < count; i++)
        memcpy(kept + r->call->attention.deltas[first + i] * hidden, delta + i * hidden, (size_t)hidden * sizeof *kept);
}

/* From the mixed values to what the MLP adds, which is left in `scratch.narrow`. */
static void finish_tile(const Rows *r, long layer, long first, long count, Scratch scratch) {
    const Shape *s = &r->call->shape;
    const Layer *of = r->call->layers + layer;
    const long mixed = s->heads * s->head_dim, hidden = s->hidden;
    const Weight output = output_of(s, of);
    const Deltas kept = deltas_of(r->call, layer);
    pack_tile(r->mixed + first * mixed, mixed, count, mixed, scratch.packed);
    multiply_tile(&output, scratch.packed, count, scratch.narrow);
    keep_deltas(r, kept.attention, scratch.narrow, first, count);
    for (long i = 0; i < count; i++)
        rms_norm(r->h + (first + i) * hidden, scratch.narrow + i * hidden, of->mlp_norm, scratch.wide + i * hidden,
                 hidden, s->eps);
    pack_tile(scratch.wide, hidden, count, hidden, scratch.packed);
    run_mlp(s, of, count, scratch);
    keep_deltas(r, kept.mlp, scratch.narrow, first, count);
}

/* What all threads share where weights are large: packed rows, what a weight makes of them, what a sublayer adds to
 * them, and a count of the blocks that are taken for each product. */
typedef struct {
    float *packed, *wide, *pending;
    long *taken;
} Shared;

/* Adds what is pending, if there is a sublayer before, keeps it, and packs the normed rows. */
static void norm_shared(const Rows *r, const float *norm_weight, const float *pending, float *kept,
                        const Shared *shared) {
    const long hidden = r->call->shape.hidden, rows = r->count, together = rows_of_pass(rows);
#pragma omp for
    for (long first = 0; first < rows; first += together) {
        const long last = first + together < rows ? first + together : rows;
        if (pending) keep_deltas(r, kept, pending + first * hidden, first, last - first);
        for (long row = first; row < last; row++)
            rms_norm(r->h + row * hidden, pending ? pending + row * hidden : NULL, norm_weight,
                     shared->wide + row * hidden, hidden, r->call->shape.eps);
        pack_pass(shared->wide, hidden, rows, hidden, first / together, shared->packed);
    }
}

static void project_shared(const Rows *r, long layer, const float *pending, float *kept, Shared *shared) {
    const Shape *s = &r->call->shape;
    const Layer *of = r->call->layers + layer;
    const long width = qkv_width(s);
    const Heads heads = heads_of(r->call, of);
    const Weight qkv = qkv_of(s, of);
    norm_shared(r, of->attention_norm, pending, kept, shared);
    multiply_shared(&qkv, shared->packed, r->count, r->projected, shared->taken++);
#pragma omp for
    for (long row = 0; row < r->count; row++)
        store_row(&heads, r->projected + row * width, r->call->written_rotation, row, stored_of(r->call, layer),
                  r->call->places + row);
}

/* From the mixed values to what the MLP adds, which is left in `shared->pending`. */
static void finish_shared(const Rows *r, long layer, Shared *shared) {
    const Shape *s = &r->call->shape;
    const Layer *of = r->call->layers + layer;
    const long mixed = s->heads * s->head_dim, mlp = s->mlp, rows = r->count, together = rows_of_pass(rows);
    const Weight output = output_of(s, of), gate_up = gate_up_of(s, of), down = down_of(s, of);
#pragma omp for
    for (long first = 0; first < rows; first += together)
        pack_pass(r->mixed, mixed, rows, mixed, first / together, shared->packed);
    multiply_shared(&output, shared->packed, rows, shared->pending, shared->taken++);
    norm_shared(r, of->mlp_norm, shared->pending, deltas_of(r->call, layer).attention, shared);
    multiply_shared(&gate_up, shared->packed, rows, shared->wide, shared->taken++);
#pragma omp for
    for (long first = 0; first < rows; first += together) {
        const long last = first + together < rows ? first + together : rows;
        for (long row = first; row < last; row++) /* in place: the gate is not needed any more */
            silu_product_row(shared->wide + row * 2 * mlp, shared->wide + row * 2 * mlp, mlp);
        pack_pass(shared->wide, 2 * mlp, rows, mlp, first / together, shared->packed);
    }
    multiply_shared(&down, shared->packed, rows, shared->pending, shared->taken++);
}

/* Rows that go on after a layer's keys and values, where they are not all: their hidden states and their queries lie
 * apart, each side by side. */
static void keep_row(const Rows *all, const Rows *on, long i) {
    const Shape *s = &all->call->shape;
    const long row = all->call->attention.rows[i], hidden = s->hidden, mixed = s->heads * s->head_dim;
    memcpy(on->h + i * hidden, all->h + row * hidden, (size_t)hidden * sizeof(float));
    memcpy(on->projected + i * mixed, all->projected + row * qkv_width(s), (size_t)mixed * sizeof(float));
}

static void keep_rows(const Rows *all, const Rows *on) {
#pragma omp for
    for (long i = 0; i < (on->h == all->h ? 0 : on->count); i++) keep_row(all, on, i);
}

static void attend(const Rows *on, const long *firsts, long layer) {
    const Call *c = on->call;
    const Heads heads = heads_of(c, c->layers + layer);
    attend_segments(&heads, on->projected, c->attention.rows ? c->shape.heads * c->shape.head_dim : qkv_width(&c->shape),
                    on->mixed, stored_of(c, layer), c->attending, firsts);
}

static void run_tiles(const Call *call, const Rows *all, const Rows *on, const long *firsts, Scratch scratch) {
    const long threads = threads_at_most(), hidden = call->shape.hidden, rows = all->count, going = on->count;
    const long tiles = count_tiles(rows, threads), going_tiles = count_tiles(going, threads);
#pragma omp for schedule(dynamic)
    for (long tile = 0; tile < tiles; tile++) {
        const long first = rows * tile / tiles;
        project_tile(all, 0, first, rows * (tile + 1) / tiles - first, NULL, scratch);
    }
    keep_rows(all, on);
    for (long i = 0; i < call->count; i++) {
        attend(on, firsts, i);
#pragma omp for schedule(dynamic)
        for (long tile = 0; tile < going_tiles; tile++) {
            const long first = going * tile / going_tiles, some = going * (tile + 1) / going_tiles - first;
            finish_tile(on, i, first, some, scratch);
            if (i + 1 < call->count)
                project_tile(on, i + 1, first, some, scratch.narrow, scratch);
            else
                for (long j = 0; j < some * hidden; j++) on->h[first * hidden + j] += scratch.narrow[j];
        }
    }
}

static void run_shared(const Call *call, const Rows *all, const Rows *on, const long *firsts, Shared shared) {
    const long hidden = call->shape.hidden;
    project_shared(all, 0, NULL, NULL, &shared);
    keep_rows(all, on);
    for (long i = 0; i < call->count; i++) {
        float *kept = deltas_of(call, i).mlp;
        attend(on, firsts, i);
        finish_shared(on, i, &shared);
        if (i + 1 < call->count) {
            project_shared(on, i + 1, shared.pending, kept, &shared);
            continue;
        }
#pragma omp for
        for (long row = 0; row < on->count; row++) {
            keep_deltas(on, kept, shared.pending + row * hidden, row, 1);
            for (long j = row * hidden; j < (row + 1) * hidden; j++) on->h[j] += shared.pending[j];
        }
    }
}

/* Runs all sublayers of all rows. With `attention.rows`, whose hidden states come to `kept_h`, only those go on after the
 * keys and values of a single layer. */
long stepsaver_run_layers(const Call *call) {
    const Shape *s = &call->shape;
    const long rows = call->rows, going = call->attention.count, hidden = s->hidden, is_large = s->is_large;
    const long mixed = s->heads * s->head_dim, width = qkv_width(s), inputs = most(most(hidden, mixed), s->mlp);
    const long many = is_large ? rows : MOST_TILE; /* rows that are between two products at a time */
    const long narrow = many * most(hidden, is_large ? 0 : s->mlp), wide = many * most(hidden, 2 * s->mlp);
    const long packed = is_large ? packed_size(rows, inputs) : MOST_TILE * inputs + PACKING_ROOM;
    const long each = (narrow + wide + packed + 15) / 16 * 16, threads = is_large ? 1 : threads_at_most();
    const int are_all = !call->attention.rows;
    const long lasting = rows * (width + mixed) + (are_all ? 0 : going * mixed);
    if (!fits(call) || call->written.count != rows || (are_all ? going != rows : call->count != 1) ||
        (call->deltas && !call->attention.deltas))
        return OUT_OF_BOUNDS;
    float *memory = malloc((size_t)(lasting + threads * each) * sizeof *memory);
    long *firsts = calloc((size_t)(call->attending.count + 1 + 4 * call->count), sizeof *firsts);
    if (!memory || !firsts) {
        free(memory);
        free(firsts);
        return NO_MEMORY;
    }
    float *mixed_rows = memory + rows * width;
    const Rows all = {call, call->h, memory, mixed_rows, rows};
    const Rows on = are_all ? all : (Rows){call, call->kept_h, mixed_rows + rows * mixed, mixed_rows, going};
    const Heads any = heads_of(call, call->layers);
    list_tasks(&any, call->attending, firsts);
#pragma omp parallel if (is_large || count_tiles(rows, threads) > 1 || call->attending.count > 1)
    {
        float *own = memory + lasting + (is_large ? 0 : thread_number()) * each;
        if (is_large)
            run_shared(call, &all, &on, firsts,
                       (Shared){own, own + packed, own + packed + wide, firsts + call->attending.count + 1});
        else
            run_tiles(call, &all, &on, firsts, (Scratch){own, own + packed, own + packed + wide});
    }
    free(memory);
    free(firsts);
    return FINE;
}
