/* A few rows times a stretch of a block. Included once per instruction set: OF(name) names the functions of each, LANES is
 * the width of a vector of floats, MOST_ROWS how many rows' sums fit into the registers, two vectors each. */

typedef float OF(Vector) __attribute__((vector_size(4 * LANES)));

static ALWAYS_INLINE OF(Vector) OF(loaded)(const float *from) {
    OF(Vector) loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

static ALWAYS_INLINE OF(Vector) OF(widened)(const uint16_t *from) {
    HALVES halves;
    memcpy(&halves, from, sizeof halves);
    return WIDEN(halves);
}

/* two vectors of outputs, from `column` on, for a number of rows that the compiler knows */
static ALWAYS_INLINE void OF(columns)(const Stretch *s, const long column, const int rows, const int is_widened) {
    OF(Vector) low[MOST_ROWS] = {{0}}, high[MOST_ROWS] = {{0}};
    const float *x = s->x;
    const char *fetch = s->fetch;
    for (long e = 0; e < s->inputs; e++, x += rows) {
        OF(Vector) first, second;
        if (is_widened) {
            first = OF(loaded)(s->floats + e * BLOCK + column);
            second = OF(loaded)(s->floats + e * BLOCK + column + LANES);
        } else {
            first = OF(widened)(s->halves + e * BLOCK + column);
            second = OF(widened)(s->halves + e * BLOCK + column + LANES);
        }
        __builtin_prefetch(fetch);
        fetch += s->fetch_step;
#pragma GCC unroll 14
        for (int i = 0; i < rows; i++) {
            low[i] += x[i] * first;
            high[i] += x[i] * second;
        }
    }
#pragma GCC unroll 14
    for (int i = 0; i < rows; i++) {
        if (s->before) {
            low[i] += OF(loaded)(s->before + i * s->before_apart + column);
            high[i] += OF(loaded)(s->before + i * s->before_apart + column + LANES);
        }
        memcpy(s->sums + i * s->sums_apart + column, &low[i], sizeof low[i]);
        memcpy(s->sums + i * s->sums_apart + column + LANES, &high[i], sizeof high[i]);
    }
}

#define CASE(count)                                     \
    case count:                                         \
        if (count <= MOST_ROWS) {                       \
            if (s->floats)                              \
                OF(columns)(s, column, count, 1);       \
            else                                        \
                OF(columns)(s, column, count, 0);       \
        }                                               \
        break;

static void OF(multiply_rows)(const Stretch *s, long rows) {
    for (long column = 0; column < BLOCK; column += 2 * LANES) {
        switch (rows) {
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7)
            CASE(8) CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14)
        }
    }
}
#undef CASE

static void OF(widen_stretch)(const uint16_t *halves, float *floats, long inputs) {
    for (long i = 0; i < inputs * BLOCK; i += LANES) {
        const OF(Vector) wide = OF(widened)(halves + i);
        memcpy(floats + i, &wide, sizeof wide);
    }
}
