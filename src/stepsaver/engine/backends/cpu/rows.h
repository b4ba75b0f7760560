/* The loops over one row. Included once per instruction set, with OF(name) naming the functions of each, and Lanes and
 * Mask its vectors of LANES numbers. */

static ALWAYS_INLINE Lanes OF(choose)(Mask where, Lanes yes, Lanes no) {
    return (Lanes)((where & (Mask)yes) | (~where & (Mask)no));
}

static ALWAYS_INLINE Lanes OF(load)(const float *from) {
    Lanes loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

static ALWAYS_INLINE void OF(store)(float *to, Lanes lanes) { memcpy(to, &lanes, sizeof lanes); }

/* e^x to two units in the last place, of x between -87 and 88 or the nearer of the two; of NaN and infinities NaN */
static ALWAYS_INLINE Lanes OF(exp)(Lanes x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which its last bits then are */
    x = OF(choose)(x < -87.0f, x * 0.0f - 87.0f, x);
    x = OF(choose)(x > 88.0f, x * 0.0f + 88.0f, x);
    const Lanes rounded = x * 1.44269504f + shift, n = rounded - shift;
    const Lanes r = x - n * 0.693359375f - n * -2.12194440e-4f;
    Lanes p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (Lanes)(((Mask)rounded + 127) << 23);
}

static void OF(rms_norm)(float *restrict x, const float *restrict pending, const float *restrict norm_weight,
                         float *restrict out, long width, float eps) {
    float sums[32] = {0};
    long i = 0;
    if (pending)
        for (; i < width; i++) x[i] += pending[i];
    for (i = 0; i + 32 <= width; i += 32)
        for (long j = 0; j < 32; j++) sums[j] += x[i + j] * x[i + j];
    for (; i < width; i++) sums[i % 32] += x[i] * x[i];
    for (long half = 16; half > 0; half /= 2)
        for (long j = 0; j < half; j++) sums[j] += sums[j + half];
    const float factor = 1.0f / sqrtf(sums[0] / (float)width + eps);
    for (i = 0; i < width; i++) out[i] = x[i] * factor * norm_weight[i];
}

static ALWAYS_INLINE void OF(silu_product_lanes)(const float *gate, const float *up, float *out, size_t bytes) {
    Lanes g = {0}, u = {0};
    memcpy(&g, gate, bytes);
    memcpy(&u, up, bytes);
    const Lanes product = g / (1.0f + OF(exp)(-g)) * u;
    memcpy(out, &product, bytes);
}

static void OF(silu_product_row)(const float *gate, const float *up, float *out, long width) {
    long i = 0;
    for (; i + LANES <= width; i += LANES) OF(silu_product_lanes)(gate + i, up + i, out + i, sizeof(Lanes));
    if (i < width) OF(silu_product_lanes)(gate + i, up + i, out + i, (size_t)(width - i) * sizeof(float));
}

/* The largest of some numbers, their sum, and the sum of their exponentials below a given largest one. NaN is never the
 * largest, and makes a sum NaN. */
static float OF(largest)(const float *x, long width) {
    Lanes most = (Lanes){0} - INFINITY;
    long i = 0;
    for (; i + LANES <= width; i += LANES) {
        const Lanes next = OF(load)(x + i);
        most = OF(choose)(next > most, next, most);
    }
    float result = -INFINITY;
    for (int lane = 0; lane < LANES; lane++) result = most[lane] > result ? most[lane] : result;
    for (; i < width; i++) result = x[i] > result ? x[i] : result;
    return result;
}

static Sums OF(sums_of)(const float *x, long width, float most) {
    Lanes plain = {0}, exponentials = {0};
    long i = 0;
    for (; i + LANES <= width; i += LANES) {
        const Lanes next = OF(load)(x + i);
        plain += next;
        exponentials += OF(exp)(next - most);
    }
    Sums sums = {0.0f, 0.0f};
    for (int lane = 0; lane < LANES; lane++) {
        sums.plain += plain[lane];
        sums.exponentials += exponentials[lane];
    }
    for (; i < width; i++) {
        const Lanes last = {x[i] - most};
        sums.plain += x[i];
        sums.exponentials += OF(exp)(last)[0];
    }
    return sums;
}

/* Each head's root-mean-square norm, in place; `weight` is a factor per column. */
static void OF(norm_heads)(float *restrict x, const float *restrict weight, long heads, long width, float eps) {
    for (long head = 0; head < heads; head++, x += width) {
        float sums[8] = {0};
        for (long i = 0; i + 8 <= width; i += 8)
            for (long j = 0; j < 8; j++) sums[j] += x[i + j] * x[i + j];
        for (long i = width / 8 * 8; i < width; i++) sums[i % 8] += x[i] * x[i];
        for (long half = 4; half > 0; half /= 2)
            for (long j = 0; j < half; j++) sums[j] += sums[j + half];
        const float factor = 1.0f / sqrtf(sums[0] / (float)width + eps);
        for (long i = 0; i < width; i++) x[i] *= factor * weight[i];
    }
}

static void OF(rotate_row)(float *restrict x, const float *restrict cosines, const float *restrict sines, long heads,
                       long half) {
    const long even = half / 8 * 8;
    for (long head = 0; head < heads; head++, x += 2 * half) {
        for (long i = 0; i < even; i += 8) {
            Lanes8 a, b, cosine, sine;
            memcpy(&a, x + i, sizeof a);
            memcpy(&b, x + i + half, sizeof b);
            memcpy(&cosine, cosines + i, sizeof cosine);
            memcpy(&sine, sines + i, sizeof sine);
            const Lanes8 first = a * cosine - b * sine, second = b * cosine + a * sine;
            memcpy(x + i, &first, sizeof first);
            memcpy(x + i + half, &second, sizeof second);
        }
        for (long i = even; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = a * cosines[i] - b * sines[i];
            x[i + half] = b * cosines[i] + a * sines[i];
        }
    }
}

/* Transposes LANES columns of some rows, which lie `stride` apart. The columns become rows `to_apart` apart, each filled
 * up with repeats of its last number to LANES of them. They are written in their order. */
static ALWAYS_INLINE void OF(transpose)(const float *from, long stride, long count, float *to, long to_apart) {
#if LANES == 16
    Lanes rows[16], mixed[16]; /* every round puts the numbers of two rows eight apart in turn: four make columns */
    UNROLLED for (int i = 0; i < 16; i++) rows[i] = OF(load)(from + (i < count ? i : count - 1) * stride);
    UNROLLED for (int round = 0; round < 4; round++) {
        UNROLLED for (int i = 0; i < 8; i++) {
            mixed[2 * i] = SHUFFLE(rows[i], rows[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            mixed[2 * i + 1] =
                SHUFFLE(rows[i], rows[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
        UNROLLED for (int i = 0; i < 16; i++) rows[i] = mixed[i];
    }
    UNROLLED for (int i = 0; i < 16; i++) OF(store)(to + i * to_apart, rows[i]);
#else
    Lanes r[8], pairs[8], fours[8];
    UNROLLED for (int i = 0; i < 8; i++) r[i] = OF(load)(from + (i < count ? i : count - 1) * stride);
    UNROLLED for (int i = 0; i < 8; i += 2) {
        pairs[i] = SHUFFLE(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        pairs[i + 1] = SHUFFLE(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    UNROLLED for (int i = 0; i < 8; i += 4)
        UNROLLED for (int j = 0; j < 2; j++) {
            fours[i + 2 * j] = SHUFFLE(pairs[i + j], pairs[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            fours[i + 2 * j + 1] = SHUFFLE(pairs[i + j], pairs[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    UNROLLED for (int i = 0; i < 4; i++)
        OF(store)(to + i * to_apart, SHUFFLE(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11));
    UNROLLED for (int i = 0; i < 4; i++)
        OF(store)(to + (i + 4) * to_apart, SHUFFLE(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15));
#endif
}

/* Rows side by side, input after input. What is written beyond the rows of an input, the next one overwrites. */
static void OF(pack_rows)(const float *x, long apart, long rows, long inputs, float *packed) {
    long e = 0;
    if (rows <= LANES)
        for (; e + LANES <= inputs; e += LANES) OF(transpose)(x + e, apart, rows, packed + e * rows, rows);
    for (; e < inputs; e++)
        for (long i = 0; i < rows; i++) packed[e * rows + i] = x[i * apart + e];
}

/* The products of some queries with a chunk of keys, which lie transposed; a row of `scores` is one query's. */
static ALWAYS_INLINE void OF(score)(const float *const *queries, float *scores, const float *transposed, long head_dim,
                                    const int count) {
    Lanes low[TOGETHER] = {{0}}, high[TOGETHER] = {{0}};
    for (long e = 0; e < head_dim; e++) {
        const Lanes first = OF(load)(transposed + e * CHUNK), second = OF(load)(transposed + e * CHUNK + LANES);
        UNROLLED for (int i = 0; i < count; i++) {
            low[i] += queries[i][e] * first;
            high[i] += queries[i][e] * second;
        }
    }
    UNROLLED for (int i = 0; i < count; i++) {
        OF(store)(scores + i * LONGEST_CONTEXT, low[i]);
        OF(store)(scores + i * LONGEST_CONTEXT + LANES, high[i]);
    }
}

/* A query's scores become shares of a sum, which is returned. They fill whole vectors, -FLT_MAX where there is no key. */
static float OF(exponentiate)(float *scores, long length, float scale) {
    const float most = OF(largest)(scores, length);
    Lanes total = {0};
    for (long l = 0; l < length; l += LANES) {
        const Lanes share = OF(exp)((OF(load)(scores + l) - most) * scale);
        total += share;
        OF(store)(scores + l, share);
    }
    float sum = 0.0f;
    for (int lane = 0; lane < LANES; lane++) sum += total[lane];
    return sum;
}

/* The values, two vectors of columns, weighted by some queries' shares. */
static ALWAYS_INLINE void OF(blend_wide)(const float *shares, const float *sums, float *const *outs,
                                         const float *values, long length, long head_dim, long column,
                                         const int count) {
    Lanes low[TOGETHER] = {{0}}, high[TOGETHER] = {{0}};
    for (long l = 0; l < length; l++) {
        const float *row = values + l * head_dim + column;
        const Lanes first = OF(load)(row), second = OF(load)(row + LANES);
        UNROLLED for (int i = 0; i < count; i++) {
            low[i] += shares[i * LONGEST_CONTEXT + l] * first;
            high[i] += shares[i * LONGEST_CONTEXT + l] * second;
        }
    }
    UNROLLED for (int i = 0; i < count; i++) {
        OF(store)(outs[i] + column, low[i] / sums[i]);
        OF(store)(outs[i] + column + LANES, high[i] / sums[i]);
    }
}

/* The same of one vector of columns: rows go in turn to two sums, so that neither waits for the other. Shares are stored
 * in whole chunks, so that there is a finite one after the last. */
static ALWAYS_INLINE void OF(blend_narrow)(const float *shares, const float *sums, float *const *outs,
                                           const float *values, long length, long head_dim, long column,
                                           const int count) {
    Lanes even[TOGETHER] = {{0}}, odd[TOGETHER] = {{0}};
    for (long l = 0; l < length; l += 2) {
        const float *row = values + l * head_dim + column;
        const Lanes first = OF(load)(row), second = l + 1 < length ? OF(load)(row + head_dim) : (Lanes){0};
        UNROLLED for (int i = 0; i < count; i++) {
            even[i] += shares[i * LONGEST_CONTEXT + l] * first;
            odd[i] += shares[i * LONGEST_CONTEXT + l + 1] * second;
        }
    }
    UNROLLED for (int i = 0; i < count; i++) OF(store)(outs[i] + column, (even[i] + odd[i]) / sums[i]);
}

static ALWAYS_INLINE void OF(blend)(const float *shares, const float *sums, float *const *outs, const float *values,
                                    long length, long head_dim, const int count) {
    long column = 0;
    for (; column + 2 * LANES <= head_dim; column += 2 * LANES)
        OF(blend_wide)(shares, sums, outs, values, length, head_dim, column, count);
    if (column < head_dim) OF(blend_narrow)(shares, sums, outs, values, length, head_dim, column, count);
}

/* Softmax attention of some queries over the first keys and values of a slot, which are read as they lie in the cache.
 * Keys, then columns of the values, are the lanes of vectors; up to TOGETHER queries share what is loaded. Each query
 * sees what its view says, and its result does not depend on the other queries, nor on how many there are.
 * Meanwhile the keys and values of the next task are fetched. */
static void OF(attend_tile)(const float *const *queries, float *const *outs, long count, const float *keys,
                            const float *values, const View *views, long head_dim, float scale, Fetch next) {
    float scores[TILE * LONGEST_CONTEXT], transposed[LONGEST_HEAD * CHUNK], last[LONGEST_HEAD * CHUNK], sums[TILE];
    long length = 0;
    for (long i = 0; i < count; i++) length = views[i].seen > length ? views[i].seen : length;
    const long groups = (count + TOGETHER - 1) / TOGETHER, together = (count + groups - 1) / groups;
    const long chunks = (length + CHUNK - 1) / CHUNK;
    for (long l = 0; l < length; l += CHUNK) {
        const float *chunk = keys + l * head_dim;
        fetch_part(next.keys, next.bytes, l / CHUNK, chunks);
        if (length - l < CHUNK) {
            memset(last, 0, (size_t)(CHUNK * head_dim) * sizeof(float));
            chunk = memcpy(last, chunk, (size_t)((length - l) * head_dim) * sizeof(float));
        }
        for (long half = 0; half < CHUNK; half += LANES)
            for (long e = 0; e < head_dim; e += LANES)
                OF(transpose)(chunk + half * head_dim + e, head_dim, LANES, transposed + e * CHUNK + half, CHUNK);
        for (long i = 0; i < count; i += together) {
            float *to = scores + i * LONGEST_CONTEXT + l;
            FOR_COUNT(count - i < together ? count - i : together, OF(score), queries + i, to, transposed, head_dim)
        }
    }
    for (long i = 0; i < count; i++) {
        float *of_query = scores + i * LONGEST_CONTEXT;
        fetch_part(next.values, next.bytes, i, count);
        const View view = views[i];
        const long vectors = (view.seen + LANES - 1) / LANES * LANES;
        for (long l = view.gap; l < view.resume; l++) of_query[l] = -FLT_MAX;
        for (long l = view.seen; l < vectors; l++) of_query[l] = -FLT_MAX;
        sums[i] = OF(exponentiate)(of_query, vectors, scale);
        for (long l = view.gap; l < view.resume; l++) of_query[l] = 0.0f; /* rows that others of the tile see */
        for (long l = view.seen; l < length; l++) of_query[l] = 0.0f;
    }
    for (long i = 0; i < count; i += together) {
        const float *shares = scores + i * LONGEST_CONTEXT;
        FOR_COUNT(count - i < together ? count - i : together, OF(blend), shares, sums + i, outs + i, values, length,
                  head_dim)
    }
}
