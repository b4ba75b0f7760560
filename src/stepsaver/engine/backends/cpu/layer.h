/* What calls of whole layers share (layers.c, reused_layers.c): a layer as Python describes it, its maps, its tiles. */
#ifndef STEPSAVER_LAYER
#define STEPSAVER_LAYER

#include "parts.h"

#ifdef _OPENMP
#include <omp.h>
#endif

/* A layer as Python describes it (layers.py): addresses, 0 where there is nothing. */
typedef struct {
    const void *qkv, *qkv_bias, *output, *output_bias, *gate_up, *gate_up_bias, *down, *down_bias;
    const float *attention_columns, *mlp_columns, *norms;
} Layer;

/* Where a layer keeps what its parts add, or NULL. */
typedef struct {
    float *attention, *mlp;
} Deltas;

typedef struct {
    long heads, kv_heads, head_dim, capacity, hidden, mlp, kind, is_large;
} Shape;

/* what a thread keeps between two maps: packed rows, what a map makes of them, and a row's part of it */
typedef struct {
    float *packed, *wide, *narrow;
} Scratch;

static inline Map map_of(const void *weights, const void *bias, long kind, long inputs, long outputs) {
    return (Map){kind == 0 ? weights : NULL, kind == 2 ? weights : NULL, bias, inputs, outputs};
}

static inline long qkv_width(const Shape *s) { return (s->heads + 2 * s->kv_heads) * s->head_dim; }

static inline Map qkv_of(const Shape *s, const Layer *layer) {
    return map_of(layer->qkv, layer->qkv_bias, s->kind, s->hidden, qkv_width(s));
}

/* Queries fill whole blocks of the weights, so keys and values begin with a block. */
static inline Map queries_of(const Shape *s, const Layer *layer) {
    return map_of(layer->qkv, layer->qkv_bias, s->kind, s->hidden, s->heads * s->head_dim);
}

static inline Map keys_values_of(const Shape *s, const Layer *layer) {
    const long before = s->heads * s->head_dim, each = s->kind == 0 ? sizeof(uint16_t) : sizeof(float);
    const float *bias = layer->qkv_bias;
    return map_of((const char *)layer->qkv + before * s->hidden * each, bias ? bias + before : NULL, s->kind, s->hidden,
                  2 * s->kv_heads * s->head_dim);
}

static inline Map output_of(const Shape *s, const Layer *layer) {
    return map_of(layer->output, layer->output_bias, s->kind, s->heads * s->head_dim, s->hidden);
}

static inline Map gate_up_of(const Shape *s, const Layer *layer) {
    return map_of(layer->gate_up, layer->gate_up_bias, s->kind, s->hidden, 2 * s->mlp);
}

static inline Map down_of(const Shape *s, const Layer *layer) {
    return map_of(layer->down, layer->down_bias, s->kind, s->mlp, s->hidden);
}

static inline Heads heads_of(const Shape *s, const Layer *layer, float eps) {
    return (Heads){s->heads, s->kv_heads, s->head_dim, s->capacity, layer->norms, eps};
}

/* What the MLP adds to a packed tile; it is left in `scratch.narrow`. */
static inline void run_mlp(const Shape *s, const Layer *layer, long count, Scratch scratch) {
    const Map gate_up = gate_up_of(s, layer), down = down_of(s, layer);
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
