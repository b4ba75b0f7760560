/* A few rows times a stretch of a block. Included once per instruction set: OF(name) names the functions of each, LANES is
 * the width of a vector of floats, MOST_ROWS how many rows' sums fit into the registers, two vectors each. */

typedef float OF(Vector) __attribute__((vector_size(4 * LANES)));

static ALWAYS_INLINE OF(Vector) OF(floats)(const float *from) {
    OF(Vector) loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

static ALWAYS_INLINE OF(Vector) OF(widened)(const uint16_t *from) {
    HALVES loaded;
    memcpy(&loaded, from, sizeof loaded);
    return WIDEN(loaded);
}

/* two vectors of outputs, from `column` on, for a number of rows that the compiler knows */
static ALWAYS_INLINE void OF(columns)(Stretch s, const long column, const int rows) {
    OF(Vector) low[MOST_ROWS] = {{0}}, high[MOST_ROWS] = {{0}};
    const uint16_t *weights = s.weights + column;
    for (long e = 0; e < s.inputs; e++, weights += BLOCK) {
        __builtin_prefetch(weights + AHEAD * BLOCK);
        const OF(Vector) first = OF(widened)(weights), second = OF(widened)(weights + LANES);
#pragma GCC unroll 14
        for (int i = 0; i < rows; i++) {
            const float x = s.x[i * s.inputs_apart + e];
            low[i] += x * first;
            high[i] += x * second;
        }
    }
#pragma GCC unroll 14
    for (int i = 0; i < rows; i++) {
        const float *before = s.is_first ? s.bias : s.out + i * s.outputs_apart;
        if (before) {
            low[i] += OF(floats)(before + column);
            high[i] += OF(floats)(before + column + LANES);
        }
        memcpy(s.out + i * s.outputs_apart + column, &low[i], sizeof low[i]);
        memcpy(s.out + i * s.outputs_apart + column + LANES, &high[i], sizeof high[i]);
    }
}

#define CASE(count)                                             \
    case count:                                                 \
        if (count <= MOST_ROWS) OF(columns)(s, column, count);  \
        break;

static void OF(multiply_rows)(Stretch s, long rows) {
    for (long column = 0; column < BLOCK; column += 2 * LANES) {
        switch (rows) {
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
            CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
        }
    }
}
#undef CASE
