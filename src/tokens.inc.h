/* What is computed of tokens and of no loss: recursions, moments, and how far two log-probs of the same tokens are apart.
 * One function per completion, in float64, by the staged blocks of blocks.inc.h. Included once per instruction set. */

/* As FN(store), but what is no number stays what it is, and float64 saturates, too. */
static void FN(store_tokens)(const TokenCall *call, const REAL *restrict from, int64_t t, int n)
{
    if (call->out_is_double) {
        double *restrict to = (double *)call->out + t;
        for (int k = 0; k < n; k++) {
            const double least = from[k] > DBL_MAX ? DBL_MAX : from[k];
            to[k] = least < -DBL_MAX ? -DBL_MAX : least;
        }
    } else {
        float *restrict to = (float *)call->out + t;
        for (int k = 0; k < n; k++) {
            const double least = from[k] > FLT_MAX ? FLT_MAX : from[k];
            to[k] = (float)(least < -FLT_MAX ? -FLT_MAX : least);
        }
    }
}

/* A block is [t, t + n) of completion i; the mask of its first token, or NULL. */
#define FOR_BLOCKS                                                                                                \
    for (int64_t t = call->start[i], stop = call->stop[i]; t < stop; t += BLOCK)                                  \
        for (int n = stop - t < BLOCK ? (int)(stop - t) : BLOCK, padded = ROUND_UP(n), once = 1; once; once = 0)
#define MASK_AT(t) (call->mask ? call->mask + (t) : 0)

/* Last to first, so that the blocks count from the end; a and b are rewards and values. */
static void FN(gae)(const TokenCall *call, int64_t i)
{
    ALIGNED REAL on[BLOCK], reward[BLOCK], value[BLOCK], out[BLOCK];
    const REAL gamma = call->gamma, decay = call->gamma * call->lam;
    REAL next_value = 0, next = 0, extra = call->final ? call->final[i] : 0; /* once, on the last counted token */
    FN(fill)(reward, 0, BLOCK);
    FN(fill)(value, 0, BLOCK);
    for (int64_t stop = call->stop[i], t; stop > call->start[i]; stop = t) {
        t = stop - BLOCK > call->start[i] ? stop - BLOCK : call->start[i];
        const int n = (int)(stop - t);
        FN(load_mask)(on, MASK_AT(t), n);
        if (call->a.data) FN(load)(reward, call->a, MASK_AT(t), t, n, 0);
        if (call->b.data) FN(load)(value, call->b, MASK_AT(t), t, n, 0);
        for (int k = n - 1; k >= 0; k--) {
            const int counts = on[k] != 0;
            const REAL delta = reward[k] + extra + gamma * next_value - value[k], advantage = delta + decay * next;
            next = counts ? advantage : next;
            next_value = counts ? value[k] : next_value;
            extra = counts ? 0 : extra;
            out[k] = counts ? advantage : 0;
        }
        FN(store_tokens)(call, out, t, n);
    }
}

static void FN(moments)(const TokenCall *call, int64_t i)
{
    ALIGNED REAL on[BLOCK], value[BLOCK];
    const REAL centre = call->centre;
    REAL *sums = (REAL *)call->out + 3 * i;
    sums[0] = sums[1] = sums[2] = 0;
    FOR_BLOCKS {
        REAL count = 0, first = 0, second = 0;
        FN(load_mask)(on, MASK_AT(t), n);
        FN(load)(value, call->a, MASK_AT(t), t, n, 0);
#pragma omp simd reduction(+ : count, first, second)
        for (int k = 0; k < padded; k++) {
            const REAL deviation = value[k] - centre, d = on[k] != 0 ? deviation : 0;
            count += on[k], first += d, second += d * d;
        }
        sums[0] += count, sums[1] += first, sums[2] += second;
    }
}

static void FN(affine)(const TokenCall *call, int64_t i)
{
    ALIGNED REAL on[BLOCK], value[BLOCK];
    const REAL shift = call->shift, scale = call->scale;
    FOR_BLOCKS {
        FN(load_mask)(on, MASK_AT(t), n);
        FN(load)(value, call->a, MASK_AT(t), t, n, 0);
        for (int k = 0; k < padded; k++) {
            const REAL moved = (value[k] - shift) * scale;
            value[k] = on[k] != 0 ? moved : 0;
        }
        FN(store_tokens)(call, value, t, n);
    }
}

/* ---- two log-probs, a and b ---- */

static INLINE REAL FN(held)(REAL x, REAL low, REAL high)
{
    x = x < low ? low : x;
    return x > high ? high : x;
}

/* What counts of a block, and its log-ratios: 0 where nothing counts, or b was not scored. */
static void FN(load_log_ratios)(const TokenCall *call, REAL *restrict on, REAL *restrict a, REAL *restrict b, REAL *restrict x, int64_t t,
                                int n)
{
    FN(load_mask)(on, MASK_AT(t), n);
    FN(load)(a, call->a, MASK_AT(t), t, n, 0);
    FN(load)(b, call->b, MASK_AT(t), t, n, 0);
    for (int k = 0; k < ROUND_UP(n); k++) {
        const REAL d = a[k] - b[k];
        x[k] = b[k] == b[k] ? d : 0;
    }
}

static void FN(mismatch)(const TokenCall *call, int64_t i)
{
    ALIGNED REAL on[BLOCK], a[BLOCK], b[BLOCK], x[BLOCK];
    const REAL clamp = call->clamp, largest = FN(exp)(EXP_BOUND, EXP_BOUND).exp, smallest = FN(exp)(-EXP_BOUND, EXP_BOUND).exp;
    REAL *sums = (REAL *)call->out + N_MISMATCH * i;
    INT lowest = FN(rank)(INFINITY), highest = FN(rank)(-INFINITY);
    for (int k = 0; k < N_MISMATCH; k++) sums[k] = 0;
    FOR_BLOCKS {
        REAL tokens = 0, unscored = 0, sum = 0, size = 0, ratio = 0, square = 0, k2 = 0, k3 = 0, bad = 0;
        FN(load_log_ratios)(call, on, a, b, x, t, n);
#pragma omp simd reduction(+ : tokens, unscored, sum, size, ratio, square, k2, k3, bad) reduction(min : lowest) reduction(max : highest)
        for (int k = 0; k < padded; k++) {
            const REAL y = FN(held)(x[k], -clamp, clamp);
            const FN(Exp) e = FN(exp)(y, EXP_BOUND);
            tokens += on[k];
            unscored += b[k] != b[k] ? 1 : 0; /* where nothing counts, a and b are 0 */
            bad += ABS(a[k]) <= LARGEST ? 0 : 1;
            bad += ABS(a[k]) <= LARGEST && ABS(b[k]) > LARGEST ? 1 : 0;
            sum += x[k];
            size += ABS(x[k]);
            ratio += on[k] != 0 ? e.exp : 0;
            const REAL squared = FN(held)(e.exp * e.exp, smallest, largest); /* exp(2 y), saturated */
            square += on[k] != 0 ? squared : 0;
            k2 += y * y / 2;
            k3 += e.tail;
            const INT above = FN(rank)(on[k] != 0 ? x[k] : (REAL)INFINITY), below = FN(rank)(on[k] != 0 ? x[k] : (REAL)-INFINITY);
            lowest = above < lowest ? above : lowest;
            highest = below > highest ? below : highest;
        }
        sums[MISMATCH_TOKENS] += tokens, sums[MISMATCH_UNSCORED] += unscored, sums[MISMATCH_NON_FINITE] += bad;
        sums[MISMATCH_LOG_RATIO] += sum, sums[MISMATCH_LOG_RATIO_ABS] += size;
        sums[MISMATCH_RATIO] += ratio, sums[MISMATCH_RATIO_SQ] += square, sums[MISMATCH_K2] += k2, sums[MISMATCH_K3] += k3;
    }
    sums[MISMATCH_LOG_RATIO_MIN] = FN(unrank)(lowest), sums[MISMATCH_LOG_RATIO_MAX] = FN(unrank)(highest);
    if (sums[MISMATCH_TOKENS] == 0) return;
    /* k2 and k3 fall to 0 at y = 0 and rise after it */
    const REAL y0 = FN(held)(FN(unrank)(lowest), -clamp, clamp), y1 = FN(held)(FN(unrank)(highest), -clamp, clamp);
    sums[MISMATCH_K2_MAX] = fmax(y0 * y0 / 2, y1 * y1 / 2);
    sums[MISMATCH_K3_MAX] = fmax(FN(exp)(y0, EXP_BOUND).tail, FN(exp)(y1, EXP_BOUND).tail);
}

static void FN(mismatch_weights)(const TokenCall *call, int64_t i)
{
    ALIGNED REAL on[BLOCK], a[BLOCK], b[BLOCK], x[BLOCK];
    const REAL clamp = call->clamp, low = call->low, high = call->high;
    FOR_BLOCKS {
        FN(load_log_ratios)(call, on, a, b, x, t, n);
        for (int k = 0; k < padded; k++) x[k] = FN(exp)(FN(held)(x[k], -clamp, clamp), EXP_BOUND).exp;
        if (call->choice == OUTSIDE_CLIP)
            for (int k = 0; k < padded; k++) x[k] = on[k] != 0 ? FN(held)(x[k], low, high) : 0;
        else
            for (int k = 0; k < padded; k++) {
                const REAL own = on[k] != 0 ? x[k] : 0, least = x[k] >= low ? own : 0;
                x[k] = x[k] <= high ? least : 0;
            }
        FN(store_tokens)(call, x, t, n);
    }
}

static void FN(mismatch_keep)(const TokenCall *call, int64_t i)
{
    ALIGNED REAL on[BLOCK], a[BLOCK], b[BLOCK], x[BLOCK];
    const REAL clamp = call->clamp, low = call->low, high = call->high;
    FOR_BLOCKS {
        uint8_t *restrict keep = (uint8_t *)call->out + t;
        FN(load_log_ratios)(call, on, a, b, x, t, n);
        for (int k = 0; k < padded; k++) x[k] = FN(held)(x[k], -clamp, clamp);
        if (call->choice == STATISTIC_K2)
            for (int k = 0; k < padded; k++) x[k] = x[k] * x[k] / 2;
        else if (call->choice == STATISTIC_K3)
            for (int k = 0; k < padded; k++) x[k] = FN(exp)(x[k], EXP_BOUND).tail;
        for (int k = 0; k < n; k++) keep[k] = (on[k] != 0) & (x[k] >= low) & (x[k] <= high);
    }
}
