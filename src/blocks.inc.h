/* The loops: blocks of BLOCK tokens, staged in L1. They know levels, masks and weights, and no formula.
 * Included once per instruction set and per REAL; names are made by FN. A block's buffers are padded with
 * neutral tokens to a multiple of LANES, so that every loop is whole vectors and every sum has one order. */

#define ROUND_UP(n) (((n) + LANES - 1) / LANES * LANES)

typedef struct {
    ALIGNED REAL on[BLOCK]; /* 1 where the token counts */
    ALIGNED REAL logp[BLOCK], old_logp[BLOCK], d[BLOCK], advantage[BLOCK], c[BLOCK];
    ALIGNED REAL lam[BLOCK], lam_slope[BLOCK], r[BLOCK], tail[BLOCK];
    ALIGNED REAL value[BLOCK], dlam[BLOCK], dlogp[BLOCK];
    ALIGNED REAL kl[BLOCK], kl_slope[BLOCK], rho[BLOCK], grad[BLOCK];
} FN(Block);

/* ---- load: widen, select, pad ---- */

#define LOAD_LOOP(TYPE)                                                                           \
    do {                                                                                          \
        const TYPE *restrict from = (const TYPE *)source.data + t;                                \
        if (mask)                                                                                 \
            for (int k = 0; k < n; k++) {                                                         \
                const REAL value = (REAL)from[k]; /* masked slots are read, and dropped */        \
                to[k] = mask[k] ? value : neutral;                                                \
            }                                                                                     \
        else                                                                                      \
            for (int k = 0; k < n; k++) to[k] = (REAL)from[k];                                    \
    } while (0)

static void FN(load)(REAL *restrict to, Tokens source, const uint8_t *restrict mask, int64_t t, int n, REAL neutral)
{
    if (source.is_double)
        LOAD_LOOP(double);
    else
        LOAD_LOOP(float);
    for (int k = n; k < ROUND_UP(n); k++) to[k] = neutral;
}

static void FN(load_mask)(REAL *restrict on, const uint8_t *restrict mask, int n)
{
    if (mask)
        for (int k = 0; k < n; k++) on[k] = mask[k] ? 1 : 0;
    else
        for (int k = 0; k < n; k++) on[k] = 1;
    for (int k = n; k < ROUND_UP(n); k++) on[k] = 0;
}

static void FN(add_steps)(REAL *restrict advantage, const Batch *batch, int64_t i, int64_t t, int n)
{
    const int64_t stop = batch->step_offsets[i + 1];
    int64_t first = t - batch->start[i], low = batch->step_offsets[i], high = stop;
    while (low < high) { /* the first step that ends at or after this block's first token */
        const int64_t middle = low + (high - low) / 2;
        if (batch->step_ends[middle] < first)
            low = middle + 1;
        else
            high = middle;
    }
    for (int k = 0; low < stop && k < n; low++) {
        const int64_t last = batch->step_ends[low] - first;
        const int end = last + 1 < n ? (int)(last + 1) : n;
        const REAL value = (REAL)batch->step_advantages[low];
        for (; k < end; k++) advantage[k] += value;
    }
}

static void FN(fill)(REAL *restrict to, REAL value, int padded)
{
    for (int k = 0; k < padded; k++) to[k] = value;
}

static void FN(load_advantages)(REAL *restrict advantage, const Batch *batch, const uint8_t *mask, int64_t i, int64_t t, int n,
                                const Shared *shared)
{
    if (batch->token_advantages.data) {
        FN(load)(advantage, batch->token_advantages, mask, t, n, 0);
        if (batch->advantages)
            for (int k = 0; k < n; k++) advantage[k] += (REAL)shared->advantage;
    } else
        FN(fill)(advantage, (REAL)shared->advantage, ROUND_UP(n));
    if (batch->step_advantages) FN(add_steps)(advantage, batch, i, t, n);
}

/* ---- level: pre of the token log-ratios and its slope ---- */

static void FN(pre)(const Plan *plan, REAL *restrict x, REAL *restrict slope, const REAL *restrict advantage, int padded)
{
    const REAL low = (REAL)plan->pre_lo, high = (REAL)plan->pre_hi;
    if (plan->pre == PRE_IDENTITY)
        for (int k = 0; k < padded; k++) slope[k] = 1;
    else if (plan->pre == PRE_CLAMP)
        for (int k = 0; k < padded; k++) {
            REAL held = x[k] > low ? x[k] : low;
            held = held < high ? held : high;
            slope[k] = held == x[k] ? 1 : 0;
            x[k] = held;
        }
    else
        for (int k = 0; k < padded; k++) {
            REAL held = x[k] > low ? x[k] : low;
            held = held < high ? held : high;
            const REAL least = x[k] < held ? x[k] : held, most = x[k] > held ? x[k] : held;
            const REAL taken = advantage[k] > 0 ? least : most;
            slope[k] = taken == x[k] ? 1 : 0;
            x[k] = taken;
        }
}

static void FN(clamp_lam)(const Plan *plan, REAL *restrict lam, REAL *restrict slope, int padded)
{
    if (plan->lam_lo == -INFINITY && plan->lam_hi == INFINITY) return;
    const REAL low = (REAL)plan->lam_lo, high = (REAL)plan->lam_hi;
    for (int k = 0; k < padded; k++) {
        REAL held = lam[k] > low ? lam[k] : low;
        held = held < high ? held : high;
        slope[k] = held == lam[k] ? slope[k] : 0;
        lam[k] = held;
    }
}

/* ---- formulas, one loop each ---- */

#define SURROGATE_LOOP(number, name)                                                                             \
    case number:                                                                                                 \
        for (int k = 0; k < padded; k++) {                                                                       \
            const FN(Slopes) f = FN(name)(b->lam[k], b->r[k], b->logp[k], b->old_logp[k], b->advantage[k], p);   \
            b->value[k] = f.value, b->dlam[k] = f.dlam, b->dlogp[k] = f.dlogp;                                   \
        }                                                                                                        \
        break;

static void FN(surrogates)(const Plan *plan, FN(Block) *restrict b, int padded)
{
    const REAL p[4] = {(REAL)plan->p[0], (REAL)plan->p[1], (REAL)plan->p[2], (REAL)plan->p[3]};
    switch (plan->surrogate) { SURROGATES(SURROGATE_LOOP) }
}

#define KL_LOOP(number, name)                                              \
    case number:                                                           \
        for (int k = 0; k < padded; k++) {                                 \
            const FN(Kl) f = FN(name)(d[k], bound);                        \
            b->kl[k] = f.value, b->kl_slope[k] = through ? f.both : f.slope; \
        }                                                                  \
        break;

/* kl_slope is that of rho k over rho: k' + k where rho has a slope of its own. */
static void FN(kls)(const Plan *plan, FN(Block) *restrict b, int padded)
{
    const int through = plan->rho == RHO_RATIO && plan->rho_level != LEVEL_SEQUENCE;
    const REAL bound = (REAL)plan->exp_bound, in = (REAL)plan->kl_clamp_in, out = (REAL)plan->kl_clamp_out;
    const int clamped = plan->kl_clamp_in != INFINITY;
    ALIGNED REAL held[BLOCK];
    if (clamped)
        for (int k = 0; k < padded; k++) {
            const REAL least = b->d[k] > -in ? b->d[k] : -in;
            held[k] = least < in ? least : in;
        }
    const REAL *restrict d = clamped ? held : b->d;
    switch (plan->kl) { KLS(KL_LOOP) }
    if (clamped)
        for (int k = 0; k < padded; k++) b->kl_slope[k] = held[k] == b->d[k] ? b->kl_slope[k] : through ? b->kl[k] : 0;
    if (plan->kl_clamp_out != INFINITY)
        for (int k = 0; k < padded; k++) {
            REAL value = b->kl[k] > -out ? b->kl[k] : -out;
            value = value < out ? value : out;
            b->kl_slope[k] = value == b->kl[k] ? b->kl_slope[k] : through ? value : 0;
            b->kl[k] = value;
        }
    if (plan->kl_straight_through)
        for (int k = 0; k < padded; k++) b->kl_slope[k] = (through ? b->kl[k] : 0) - b->d[k];
}

static void FN(exps)(const REAL *restrict x, REAL *restrict r, REAL *restrict tail, REAL bound, int padded)
{
    for (int k = 0; k < padded; k++) {
        const FN(Exp) e = FN(exp)(x[k], bound);
        r[k] = e.exp, tail[k] = e.tail;
    }
}

/* ---- one block ---- */

#if !REAL_IS_DOUBLE
/* Whether the numbers that the tokens of a completion share are too large for float32 products. */
static int FN(needs_wide)(const Shared *shared)
{
    return !(fabs(shared->weight) <= 1e6 && fabs(shared->kl_weight) <= 1e6 && fabs(shared->lam) <= WIDE_LOG
             && fabs(shared->advantage * shared->surrogate_weight) <= WIDE_FACTOR && fabs(shared->log_rho) <= WIDE_LOG);
}

/* The same block in float64. */
static void FN(wide_block)(const Plan *plan, const Batch *batch, int64_t i, const Shared *shared, int64_t t, int n, Sums *sums)
{
    WIDE(Block) block;
    WIDE(prepare)(plan, shared, &block);
    WIDE(block)(plan, batch, i, shared, &block, t, n, sums);
}

/* Whether a block's sums say that nothing overflowed and that all that was counted is finite. */
static int FN(fits)(const double *sums, REAL least, REAL most)
{
    int good = !(least < -WIDE_LOG) && !(most > WIDE_LOG);
    for (int k = 0; k < N_SUMS; k++) good &= fabs(sums[k]) <= WIDE_SUM;
    return good;
}
#endif

/* Returns whether something was too large for float32, and was saturated. */
static int FN(store)(const Batch *batch, const REAL *restrict grad, int64_t t, int n)
{
    int saturated = 0;
    if (batch->grad_is_double) {
        double *restrict to = (double *)batch->grad + t;
        for (int k = 0; k < n; k++) to[k] = (double)grad[k];
        return 0;
    }
    float *restrict to = (float *)batch->grad + t;
#if REAL_IS_DOUBLE
    for (int k = 0; k < n; k++) {
        double g = grad[k] < FLT_MAX ? grad[k] : FLT_MAX;
        g = g > -FLT_MAX ? g : -FLT_MAX;
        saturated |= g != grad[k];
        to[k] = (float)g;
    }
#else
    for (int k = 0; k < n; k++) to[k] = grad[k];
#endif
    return saturated;
}

/* float32 sums go to float64 after FLUSH tokens: many equal terms, such as clipped ones, round the same way. */
#define FLUSHED for (int first = 0, last; first < padded; first = last)
#define FLUSH_END (last = first + FLUSH < padded ? first + FLUSH : padded)

static void FN(combine)(const Plan *plan, const Shared *shared, FN(Block) *restrict b, int padded, double *restrict stats,
                        double *restrict all_slopes)
{
    const REAL weight = (REAL)shared->weight, kl_weight = (REAL)shared->kl_weight;
    const REAL own = plan->level == LEVEL_SEQUENCE ? 0 : 1;
    FLUSHED {
        REAL surrogate = 0, kl = 0, slopes = 0;
        FLUSH_END;
#pragma omp simd reduction(+ : surrogate, kl, slopes)
        for (int k = first; k < last; k++) {
            const REAL on = b->on[k], c = b->c[k], rho_kl = b->rho[k] * b->kl[k];
            surrogate += on * c * b->value[k];
            slopes += on * c * b->dlam[k];
            const REAL kl_grad = kl_weight * b->rho[k] * b->kl_slope[k];
            b->grad[k] = on * (weight * (c * (own * b->lam_slope[k] * b->dlam[k] + b->dlogp[k])) + kl_grad);
            /* 0 * NaN and 0 * inf are NaN: what is not finite, or overflows float32, shows in the sum, whatever came of it */
            kl += on * rho_kl + 0 * (b->logp[k] + b->old_logp[k] + b->lam[k] + b->d[k] + (REAL_IS_DOUBLE ? 0 : b->grad[k]));
        }
        stats[STAT_SURROGATE] += (double)surrogate;
        stats[STAT_KL] += (double)kl;
        *all_slopes += (double)slopes;
    }
}

static void FN(measure)(const Plan *plan, const FN(Block) *restrict b, int padded, double *restrict stats)
{
    const REAL clip_lo = (REAL)plan->clip_lo, clip_hi = (REAL)plan->clip_hi;
    REAL low = 0, high = 0;
    INT lowest = FN(rank)(INFINITY), highest = FN(rank)(-INFINITY);
    FLUSHED {
        REAL log_ratio = 0, tail = 0, ratio = 0, square = 0;
        FLUSH_END;
#pragma omp simd reduction(+ : log_ratio, tail, ratio, square, low, high) reduction(min : lowest) reduction(max : highest)
        for (int k = first; k < last; k++) {
            const REAL on = b->on[k], lam = b->lam[k], r = b->r[k];
            low += b->advantage[k] < 0 && r < clip_lo ? on : 0;
            high += b->advantage[k] > 0 && r > clip_hi ? on : 0;
            log_ratio += on * lam;
            tail += on * b->tail[k];
            ratio += on * r;
            square += on * r * r;
            const INT above = FN(rank)(on != 0 ? lam : (REAL)INFINITY), below = FN(rank)(on != 0 ? lam : (REAL)-INFINITY);
            lowest = above < lowest ? above : lowest;
            highest = below > highest ? below : highest;
        }
        stats[STAT_LOG_RATIO] += (double)log_ratio;
        stats[STAT_APPROX_KL] += (double)tail;
        stats[STAT_RATIO] += (double)ratio;
        stats[STAT_RATIO_SQ] += (double)square;
    }
    stats[STAT_CLIP_LOW] += (double)low;
    stats[STAT_CLIP_HIGH] += (double)high;
    stats[STAT_LOG_RATIO_MIN] = (double)FN(unrank)(lowest);
    stats[STAT_LOG_RATIO_MAX] = (double)FN(unrank)(highest);
}

/* Fills what no block of this completion changes. */
static void FN(prepare)(const Plan *plan, const Shared *shared, FN(Block) *restrict b)
{
    FN(fill)(b->on, 1, BLOCK);
    FN(fill)(b->advantage, (REAL)shared->advantage, BLOCK);
    FN(fill)(b->c, (REAL)shared->surrogate_weight, BLOCK);
    FN(fill)(b->rho, plan->rho == RHO_NONE ? 1 : (REAL)shared->rho, BLOCK);
    FN(fill)(b->lam_slope, plan->level == LEVEL_TOKEN ? 1 : (REAL)shared->lam_slope, BLOCK);
    FN(fill)(b->lam, (REAL)shared->lam, BLOCK); /* 0 at the token level, where it is the ratio without old_logp */
    FN(fill)(b->r, (REAL)shared->r, BLOCK);
    FN(fill)(b->tail, 0, BLOCK);
    FN(fill)(b->d, 0, BLOCK);
    FN(fill)(b->kl, 0, BLOCK);
    FN(fill)(b->kl_slope, 0, BLOCK);
}

/* Tokens [t, t + n) of completion i. Returns 0, having added nothing, where float32 is too narrow. */
static int FN(block)(const Plan *plan, const Batch *batch, int64_t i, const Shared *shared, FN(Block) *restrict b, int64_t t, int n,
                     Sums *restrict sums)
{
    const uint8_t *mask = batch->mask ? batch->mask + t : 0;
    const int padded = ROUND_UP(n), has_old = batch->old_logp.data != 0, token_level = plan->level == LEVEL_TOKEN;
    const int weighs = plan->weight_use == USE_MULTIPLY && batch->token_weight.data;
    const REAL bound = (REAL)plan->exp_bound;
    ALIGNED REAL x[BLOCK]; /* the token log-ratios, where lam is not theirs */

    if (mask || n < BLOCK) FN(load_mask)(b->on, mask, n);
    FN(load)(b->logp, batch->logp, mask, t, n, 0);
    if (batch->token_advantages.data || batch->step_advantages) FN(load_advantages)(b->advantage, batch, mask, i, t, n, shared);
    if (weighs) {
        FN(load)(b->c, batch->token_weight, mask, t, n, 1);
        if (shared->surrogate_weight != 1)
            for (int k = 0; k < padded; k++) b->c[k] *= (REAL)shared->surrogate_weight;
    }
    if (plan->kl) {
        FN(load)(b->d, batch->ref_logp, mask, t, n, 0);
        for (int k = 0; k < padded; k++) b->d[k] -= b->logp[k];
    }
    if (has_old) {
        REAL *restrict log_ratio = token_level ? b->lam : x;
        FN(load)(b->old_logp, batch->old_logp, mask, t, n, 0);
        for (int k = 0; k < padded; k++) log_ratio[k] = b->logp[k] - b->old_logp[k];
        if (plan->rho != RHO_NONE && plan->rho_level == LEVEL_TOKEN) FN(exps)(log_ratio, b->rho, b->tail, bound, padded);
        if (plan->pre != PRE_IDENTITY) {
            FN(pre)(plan, log_ratio, b->lam_slope, b->advantage, padded);
            if (plan->level == LEVEL_SEQUENCE_TOKEN) /* detached: the reduction, and pre within it */
                FN(fill)(b->lam_slope, (REAL)shared->lam_slope, padded);
            else if (!token_level)
                for (int k = 0; k < padded; k++) b->lam_slope[k] *= (REAL)shared->lam_slope;
        }
    } else
        memcpy(b->old_logp, b->logp, sizeof b->old_logp);
    if (token_level) {
        if (has_old && (plan->lam_lo != -INFINITY || plan->lam_hi != INFINITY)) {
            if (plan->pre == PRE_IDENTITY) FN(fill)(b->lam_slope, 1, padded);
            FN(clamp_lam)(plan, b->lam, b->lam_slope, padded);
        }
        if (has_old) FN(exps)(b->lam, b->r, b->tail, bound, padded);
    }
    FN(surrogates)(plan, b, padded);
    if (plan->kl) FN(kls)(plan, b, padded);

    double stats[N_STATS] = {0}, slopes = 0;
    FN(combine)(plan, shared, b, padded, stats, &slopes);
    FN(measure)(plan, b, padded, stats);
#if REAL_IS_DOUBLE
    const int only_reduced = plan->weight_use != USE_MULTIPLY && batch->token_weight.data;
    if (only_reduced) FN(load)(x, batch->token_weight, mask, t, n, 1);
    const REAL *restrict weight = only_reduced ? x : b->c;
    int bad = 0;
    for (int k = 0; k < padded; k++)
        bad += !(fabs(b->logp[k]) <= LARGEST) | !(fabs(b->old_logp[k]) <= LARGEST) | !(fabs(b->d[k] + b->logp[k]) <= LARGEST)
             | !(fabs(b->advantage[k]) <= LARGEST) | !(fabs(weight[k]) <= LARGEST);
    sums->stats[STAT_NON_FINITE] += bad;
#else
    if (!FN(fits)(stats, (REAL)stats[STAT_LOG_RATIO_MIN], (REAL)stats[STAT_LOG_RATIO_MAX])) return 0;
#endif
    for (int k = 0; k < N_SUMS; k++) sums->stats[k] += stats[k];
    sums->slopes += slopes;
    sums->stats[STAT_LOG_RATIO_MIN] = fmin(sums->stats[STAT_LOG_RATIO_MIN], stats[STAT_LOG_RATIO_MIN]);
    sums->stats[STAT_LOG_RATIO_MAX] = fmax(sums->stats[STAT_LOG_RATIO_MAX], stats[STAT_LOG_RATIO_MAX]);
    if (shared->lam_share != 0 || shared->rho_share != 0) /* only when the backward is done over, see completion() */
        for (int k = 0; k < padded; k++) b->grad[k] += b->on[k] * (b->lam_slope[k] * (REAL)shared->lam_share + (REAL)shared->rho_share);
    if (batch->grad) sums->saturated |= FN(store)(batch, b->grad, t, n);
    return 1;
}

#if REAL_IS_DOUBLE

/* ---- the passes around the main one, always in float64: sums of many log-ratios lose digits otherwise ---- */

/* The sums that one number per completion is made of. */
static void FN(reduce_chunk)(const Plan *plan, const Batch *batch, int64_t i, const Shared *shared, int64_t t, int64_t stop,
                             Reduced *restrict out)
{
    const int weighs = plan->weight_use != USE_MULTIPLY && (batch->token_weight.data || batch->completion_weight);
    *out = (Reduced){0, 0, 0, 0};
    for (; t < stop; t += BLOCK) {
        ALIGNED REAL on[BLOCK], x[BLOCK], old_logp[BLOCK], slope[BLOCK], advantage[BLOCK];
        const int n = stop - t < BLOCK ? (int)(stop - t) : BLOCK, padded = ROUND_UP(n);
        const uint8_t *mask = batch->mask ? batch->mask + t : 0;
        REAL sum = 0, count = 0;
        FN(load_mask)(on, mask, n);
        FN(fill)(x, 0, padded);
        if (batch->old_logp.data) {
            FN(load)(x, batch->logp, mask, t, n, 0);
            FN(load)(old_logp, batch->old_logp, mask, t, n, 0);
            for (int k = 0; k < padded; k++) x[k] -= old_logp[k];
        }
#pragma omp simd reduction(+ : sum, count)
        for (int k = 0; k < padded; k++) sum += x[k], count += on[k];
        out->x += sum, out->count += count;
        if (plan->pre != PRE_IDENTITY) {
            if (plan->pre == PRE_SIGN_CLIP) FN(load_advantages)(advantage, batch, mask, i, t, n, shared);
            FN(pre)(plan, x, slope, advantage, padded);
            sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int k = 0; k < padded; k++) sum += on[k] * x[k];
        }
        out->pre += sum;
        if (weighs) {
            if (batch->token_weight.data)
                FN(load)(x, batch->token_weight, mask, t, n, 1);
            else
                FN(fill)(x, 1, padded);
            for (int k = 0; k < n; k++) {
                const double weight = x[k] * shared->surrogate_weight;
                if (on[k] == 0) continue;
                out->log_weight += plan->weight_use == USE_GEOMETRIC_MEAN
                                       ? log(weight + 1e-10)
                                       : fmin(fmax(log(weight), plan->lam_lo), plan->lam_hi) + 0 * weight; /* NaN is kept */
            }
        }
    }
}

/* Adds what the completion's shared log-ratio owes to every counted token. */
static void FN(finish_chunk)(const Plan *plan, const Batch *batch, int64_t i, const Shared *shared, int64_t t, int64_t stop)
{
    for (; t < stop; t += BLOCK) {
        ALIGNED REAL on[BLOCK], x[BLOCK], old_logp[BLOCK], slope[BLOCK], advantage[BLOCK];
        const int n = stop - t < BLOCK ? (int)(stop - t) : BLOCK, padded = ROUND_UP(n);
        const uint8_t *mask = batch->mask ? batch->mask + t : 0;
        FN(load_mask)(on, mask, n);
        FN(fill)(x, 0, padded);
        if (plan->pre != PRE_IDENTITY && batch->old_logp.data) {
            FN(load)(x, batch->logp, mask, t, n, 0);
            FN(load)(old_logp, batch->old_logp, mask, t, n, 0);
            for (int k = 0; k < padded; k++) x[k] -= old_logp[k];
        }
        if (plan->pre == PRE_SIGN_CLIP) FN(load_advantages)(advantage, batch, mask, i, t, n, shared);
        FN(pre)(plan, x, slope, advantage, padded);
        FN(load)(x, (Tokens){batch->grad, batch->grad_is_double}, mask, t, n, 0);
        for (int k = 0; k < padded; k++) x[k] += on[k] * (slope[k] * shared->lam_share + shared->rho_share);
        FN(store)(batch, x, t, n);
    }
}
#endif

/* The main pass over tokens [t, stop) of completion i, a whole number of blocks from its start. */
static void FN(main_chunk)(const Plan *plan, const Batch *batch, int64_t i, const Shared *shared, int64_t t, int64_t stop,
                           Sums *restrict out)
{
    FN(Block) block;
    Sums sums = {{0}, 0, 0};
    sums.stats[STAT_LOG_RATIO_MIN] = INFINITY, sums.stats[STAT_LOG_RATIO_MAX] = -INFINITY;
    FN(prepare)(plan, shared, &block);
#if REAL_IS_DOUBLE
    for (; t < stop; t += BLOCK) FN(block)(plan, batch, i, shared, &block, t, stop - t < BLOCK ? (int)(stop - t) : BLOCK, &sums);
#else
    const int fused = FN(can_fuse)(plan, batch), wide = FN(needs_wide)(shared);
    for (; t < stop; t += BLOCK) {
        const int n = stop - t < BLOCK ? (int)(stop - t) : BLOCK;
        const int done = wide ? 0
                         : fused ? FN(fused_block)(plan, batch, shared, t, n, &sums)
                                 : FN(block)(plan, batch, i, shared, &block, t, n, &sums);
        if (!done) FN(wide_block)(plan, batch, i, shared, t, n, &sums);
    }
#endif
    *out = sums;
}
