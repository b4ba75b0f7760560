/* What calls of whole layers share (layers.c, reused_layers.c): a call as Python describes it, weights, tiles. */
#ifndef STEPSAVER_LAYER
#define STEPSAVER_LAYER

#include "parts.h"

#ifdef _OPENMP
#include <omp.h>
#endif

/* A layer as Python describes it (layers.py): addresses, 0 where there is nothing. */
typedef struct {
    const void *qkv, *qkv_bias, *output, *output_bias, *gate_up, *gate_up_bias, *down, *down_bias;
    const float *attention_norm, *mlp_norm, *head_norms;
} Layer;

/* Where a layer keeps what its sublayers add, or NULL. */
typedef struct {
    float *attention, *mlp;
} Deltas;

/* Some of the packed rows, or all if `rows` is NULL, and where in a sublayer's deltas each one's is kept, or NULL. */
typedef struct {
    const int64_t *rows, *deltas;
    long count;
} RowSubset;

typedef struct {
    long heads, kv_heads, head_dim, hidden, mlp, kind, is_large;
    float eps;
} Shape;

/* Packed rows, whose hidden states change in place, and the layers that they go through (layers.py). A layer's part of
 * the cache lies behind that of the one before. Rotations are of the rows that write keys and values, and of those that
 * attend; what they see, of the latter. */
typedef struct {
    const Layer *layers;
    const Deltas *deltas; /* of each layer, or NULL */
    float *h, *kept_h;    /* of all rows; of those that go on, where they are not all */
    float *stored;
    Rotation written_rotation, attention_rotation;
    const Place *places;
    Attending attending;
    RowSubset written, attention, mlp, attention_reused, mlp_reused;
    long count, rows, delta_rows, slots, capacity; /* `count` layers */
    Shape shape;
} Call;

/* what a thread keeps between two products: packed rows, what a weight makes of them, and a row's part of it */
typedef struct {
    float *packed, *wide, *narrow;
} Scratch;

static inline Weight weight_of(const void *weights, const void *bias, long kind, long inputs, long outputs) {
    return (Weight){kind == 0 ? weights : NULL, kind == 2 ? weights : NULL, bias, inputs, outputs};
}

static inline long qkv_width(const Shape *s) { return (s->heads + 2 * s->kv_heads) * s->head_dim; }

static inline Weight qkv_of(const Shape *s, const Layer *layer) {
    return weight_of(layer->qkv, layer->qkv_bias, s->kind, s->hidden, qkv_width(s));
}

/* Queries fill whole blocks of the weights, so keys and values begin with a block. */
static inline Weight queries_of(const Shape *s, const Layer *layer) {
    return weight_of(layer->qkv, layer->qkv_bias, s->kind, s->hidden, s->heads * s->head_dim);
}

static inline Weight keys_values_of(const Shape *s, const Layer *layer) {
    const long before = s->heads * s->head_dim, each = s->kind == 0 ? sizeof(uint16_t) : sizeof(float);
    const float *bias = layer->qkv_bias;
    return weight_of((const char *)layer->qkv + before * s->hidden * each, bias ? bias + before : NULL, s->kind, s->hidden,
                  2 * s->kv_heads * s->head_dim);
}

static inline Weight output_of(const Shape *s, const Layer *layer) {
    return weight_of(layer->output, layer->output_bias, s->kind, s->heads * s->head_dim, s->hidden);
}

static inline Weight gate_up_of(const Shape *s, const Layer *layer) {
    return weight_of(layer->gate_up, layer->gate_up_bias, s->kind, s->hidden, 2 * s->mlp);
}

static inline Weight down_of(const Shape *s, const Layer *layer) {
    return weight_of(layer->down, layer->down_bias, s->kind, s->mlp, s->hidden);
}

static inline Heads heads_of(const Call *c, const Layer *layer) {
    const Shape *s = &c->shape;
    return (Heads){s->heads, s->kv_heads, s->head_dim, c->slots, c->capacity, layer->head_norms, s->eps};
}

/* A layer's part of the cache. */
static inline float *stored_of(const Call *c, long layer) {
    return c->stored + layer * c->slots * 2 * c->shape.kv_heads * c->capacity * c->shape.head_dim;
}

static inline Deltas deltas_of(const Call *c, long layer) {
    return c->deltas ? c->deltas[layer] : (Deltas){NULL, NULL};
}

static inline int subset_fits(const RowSubset *some, long rows, long delta_rows) {
    return (some->rows ? are_below(some->rows, some->count, rows) : some->count <= rows) &&
           (!some->deltas || are_below(some->deltas, some->count, delta_rows));
}

/* Whether every index of a call is within what it is an index of. */
static inline int fits(const Call *c) {
    const RowSubset *subsets[] = {&c->written, &c->attention, &c->mlp, &c->attention_reused, &c->mlp_reused};
    const Heads heads = heads_of(c, c->layers);
    int fit = places_fit(&heads, c->places, c->written.count) &&
              segments_fit(&heads, c->attending, c->attention.count);
    for (int i = 0; i < 5; i++) fit = fit && subset_fits(subsets[i], c->rows, c->delta_rows);
    return fit;
}

/* What the MLP adds to a packed tile; it is left in `scratch.narrow`. */
static inline void run_mlp(const Shape *s, const Layer *layer, long count, Scratch scratch) {
    const Weight gate_up = gate_up_of(s, layer), down = down_of(s, layer);
    const long mlp = s->mlp;
    multiply_tile(&gate_up, scratch.packed, count, scratch.wide);
    for (long i = 0; i < count; i++) silu_product_row(scratch.wide + i * 2 * mlp, scratch.narrow + i * mlp, mlp);
    pack_tile(scratch.narrow, mlp, count, mlp, scratch.packed);
    multiply_tile(&down, scratch.packed, count, scratch.narrow);
}

static inline long most(long a, long b) { return a > b ? a : b; }

/* Tiles of about as many rows each, and as many for one thread as for another. */
static inline long count_tiles(long rows, long threads) {
    const long least = (rows + most_rows_of_tile() - 1) / most_rows_of_tile();
    const long tiles = (least + threads - 1) / threads * threads;
    return tiles < rows ? tiles : rows;
}

static inline long thread_number(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

#endif
