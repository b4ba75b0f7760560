/* The loops over one row. Included once per instruction set, with OF(name) naming the functions of each. */

static ALWAYS_INLINE Lanes OF(choose)(Mask where, Lanes yes, Lanes no) {
    return (Lanes)((where & (Mask)yes) | (~where & (Mask)no));
}

/* e^x to two units in the last place, of x between -87 and 88 or the nearer of the two; NaN stays NaN */
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

static void OF(scale_row)(const float *restrict x, float *restrict out, long width, float floor_squared) {
    float sums[32] = {0};
    long i = 0;
    for (; i + 32 <= width; i += 32)
        for (long j = 0; j < 32; j++) sums[j] += x[i + j] * x[i + j];
    for (; i < width; i++) sums[i % 32] += x[i] * x[i];
    for (long half = 16; half > 0; half /= 2)
        for (long j = 0; j < half; j++) sums[j] += sums[j + half];
    const float factor = 1.0f / sqrtf(sums[0] + floor_squared);
    for (i = 0; i < width; i++) out[i] = x[i] * factor;
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
    for (; i + 8 <= width; i += 8) OF(silu_product_lanes)(gate + i, up + i, out + i, sizeof(Lanes));
    if (i < width) OF(silu_product_lanes)(gate + i, up + i, out + i, (size_t)(width - i) * sizeof(float));
}

/* The largest of some numbers, their sum, and the sum of their exponentials below a given largest one. NaN is never the
 * largest, and makes a sum NaN. */
static float OF(largest)(const float *x, long width) {
    Lanes most = {-INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY};
    long i = 0;
    for (; i + 8 <= width; i += 8) {
        Lanes next;
        memcpy(&next, x + i, sizeof next);
        most = OF(choose)(next > most, next, most);
    }
    float result = -INFINITY;
    for (int lane = 0; lane < 8; lane++) result = most[lane] > result ? most[lane] : result;
    for (; i < width; i++) result = x[i] > result ? x[i] : result;
    return result;
}

static Sums OF(sums_of)(const float *x, long width, float most) {
    Lanes plain = {0}, exponentials = {0};
    long i = 0;
    for (; i + 8 <= width; i += 8) {
        Lanes next;
        memcpy(&next, x + i, sizeof next);
        plain += next;
        exponentials += OF(exp)(next - most);
    }
    Sums sums = {0.0f, 0.0f};
    for (int lane = 0; lane < 8; lane++) {
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

static void OF(rotate_row)(float *restrict x, const float *restrict cosines, const float *restrict sines, long heads,
                       long half) {
    for (long head = 0; head < heads; head++, x += 2 * half)
        for (long i = 0; i < half; i++) {
            const float a = x[i], b = x[i + half];
            x[i] = a * cosines[i] - b * sines[i];
            x[i + half] = b * cosines[i] + a * sines[i];
        }
}

/* Softmax attention of up to 8 * vectors queries over the same keys and values. The queries are the lanes of vectors, so
 * that a query's result does not depend on the others, and keys and values are read as they lie in the cache. */
static ALWAYS_INLINE void OF(attend_lanes)(const float *const *queries, float *const *outs, long count,
                                           const float *keys, const float *values, long length, long head_dim,
                                           float scale, const int vectors) {
    const int together = 8 / vectors; /* keys, or columns of the values, per pass over the lanes: they fill the registers */
    Lanes lanes[2][LONGEST_HEAD], scores[2][LONGEST_CONTEXT];
    for (long lane = 0; lane < 8 * vectors; lane++) {
        const float *query = queries[lane < count ? lane : 0];
        for (long e = 0; e < head_dim; e++) lanes[lane / 8][e][lane % 8] = query[e] * scale;
    }
    long l = 0;
    for (; l + together <= length; l += together) {
        Lanes sums[2][8] = {{{0}}};
        for (long e = 0; e < head_dim; e++)
            for (int i = 0; i < together; i++)
                for (int v = 0; v < vectors; v++) sums[v][i] += lanes[v][e] * keys[(l + i) * head_dim + e];
        for (int v = 0; v < vectors; v++)
            for (int i = 0; i < together; i++) scores[v][l + i] = sums[v][i];
    }
    for (; l < length; l++)
        for (int v = 0; v < vectors; v++) {
            Lanes sum = {0};
            for (long e = 0; e < head_dim; e++) sum += lanes[v][e] * keys[l * head_dim + e];
            scores[v][l] = sum;
        }
    Lanes shares[2];
    for (int v = 0; v < vectors; v++) {
        Lanes most = scores[v][0], total = {0};
        for (l = 1; l < length; l++) most = OF(choose)(scores[v][l] > most, scores[v][l], most);
        for (l = 0; l < length; l++) {
            scores[v][l] = OF(exp)(scores[v][l] - most);
            total += scores[v][l];
        }
        shares[v] = 1.0f / total;
    }
    for (long e = 0; e < head_dim; e += together) {
        Lanes sums[2][8] = {{{0}}};
        for (l = 0; l < length; l++)
            for (int i = 0; i < together; i++)
                for (int v = 0; v < vectors; v++) sums[v][i] += scores[v][l] * values[l * head_dim + e + i];
        for (int v = 0; v < vectors; v++)
            for (int i = 0; i < together; i++) {
                const Lanes mixed = sums[v][i] * shares[v];
                for (long lane = 0; lane < 8 && 8 * v + lane < count; lane++) outs[8 * v + lane][e + i] = mixed[lane];
            }
    }
}

static void OF(attend_tile)(const float *const *queries, float *const *outs, long count, const float *keys,
                            const float *values, long length, long head_dim, float scale) {
    if (count > 8)
        OF(attend_lanes)(queries, outs, count, keys, values, length, head_dim, scale, 2);
    else
        OF(attend_lanes)(queries, outs, count, keys, values, length, head_dim, scale, 1);
}
