#include "pools.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>

static int ascending(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Ascending, so that the order in which rows arrive cannot change a sum. */
static void sort(double *v, int64_t n)
{
    if (n > 64) {
        qsort(v, (size_t)n, sizeof *v, ascending);
        return;
    }
    for (int64_t i = 1; i < n; i++) {
        const double x = v[i];
        int64_t j = i;
        for (; j > 0 && v[j - 1] > x; j--) v[j] = v[j - 1];
        v[j] = x;
    }
}

static double sum(const double *v, int64_t n)
{
    double total = 0;
    for (int64_t i = 0; i < n; i++) total += v[i];
    return total;
}

static double deviation(const double *sorted, int64_t n, double mean, int ddof)
{
    if (n <= ddof) return 0;
    double squares = 0;
    for (int64_t i = 0; i < n; i++) squares += (sorted[i] - mean) * (sorted[i] - mean);
    return sqrt(squares / (double)(n - ddof));
}

double grpo_std(double *values, int64_t n, int ddof)
{
    sort(values, n);
    return n ? deviation(values, n, sum(values, n) / (double)n, ddof) : 0;
}

/* Two workers that compute the same score may differ by an ULP; four ULP apart is still equal. */
static int all_equal(const double *sorted, int64_t n, double ulp)
{
    const double least = sorted[0], most = sorted[n - 1], largest = fmax(fabs(least), fabs(most));
    int exponent;
    frexp(largest, &exponent); /* largest = f 2^exponent with f in [1/2, 1) */
    return most - least <= (largest > 0 ? 4 * ulp * ldexp(1, exponent - 1) : 0);
}

static double divisor(const PoolPlan *plan, const double *sorted, int64_t n, double mean)
{
    if (plan->scale == SCALE_NONE) return 1;
    const double std = plan->scale == SCALE_BATCH ? plan->batch_std : deviation(sorted, n, mean, plan->ddof);
    return std == 0 ? 1 : std + plan->eps;
}

void grpo_standardize(const double *values, const int64_t *order, const int64_t *offsets, int64_t n_pools, const PoolPlan *plan,
                      double *scratch, double *out)
{
    for (int64_t g = 0; g < n_pools; g++) {
        const int64_t *members = order + offsets[g], n = offsets[g + 1] - offsets[g];
        if (n == 0) continue;
        if (n == 1) {
            const double own = values[members[0]] / (plan->scale == SCALE_NONE ? 1 : 1 + plan->eps);
            out[members[0]] = plan->singleton == SINGLETON_RAW ? own : 0;
            continue;
        }
        for (int64_t i = 0; i < n; i++) scratch[i] = values[members[i]];
        sort(scratch, n);
        if (plan->baseline != BASELINE_NONE && all_equal(scratch, n, plan->ulp)) {
            for (int64_t i = 0; i < n; i++) out[members[i]] = 0;
            continue;
        }
        const double mean = sum(scratch, n) / (double)n, scale = divisor(plan, scratch, n, mean);
        const double others = plan->baseline == BASELINE_LEAVE_ONE_OUT ? (double)n / (double)(n - 1) : 1;
        const double base = plan->baseline == BASELINE_NONE ? 0 : mean;
        for (int64_t i = 0; i < n; i++) out[members[i]] = (values[members[i]] - base) * others / scale;
    }
}

/* Shewchuk's algorithm: partials hold the sum without error, each below the last bit of the next. */
double grpo_exact_sum(const double *values, int64_t n, int64_t stride)
{
    double partials[48]; /* non-overlapping doubles: at most 2098 bits / 53, rounded up */
    int count = 0;
    for (int64_t i = 0; i < n; i++) {
        double x = values[i * stride];
        int kept = 0;
        for (int j = 0; j < count; j++) {
            double y = partials[j];
            if (fabs(x) < fabs(y)) {
                const double swap = x;
                x = y;
                y = swap;
            }
            const double high = x + y, low = y - (high - x);
            if (low != 0) partials[kept++] = low;
            x = high;
        }
        partials[kept++] = x;
        count = kept;
    }
    if (count == 0) return 0;
    double high = partials[--count], low = 0;
    while (count > 0) {
        const double x = high, y = partials[--count];
        high = x + y;
        low = y - (high - x);
        if (low != 0) break;
    }
    /* halfway cases are decided by the sign of what lies below */
    if (count > 0 && ((low < 0 && partials[count - 1] < 0) || (low > 0 && partials[count - 1] > 0))) {
        const double twice = low * 2, rounded = high + twice;
        if (twice == rounded - high) high = rounded;
    }
    return high;
}

#define EXPAND(TYPE, LARGEST)                                                                                                   \
    do {                                                                                                                        \
        TYPE *to = (TYPE *)out + start[i];                                                                                      \
        double value = 0;                                                                                                       \
        int64_t t = 0;                                                                                                          \
        for (int64_t j = step_offsets[i]; j < step_offsets[i + 1]; j++) {                                                       \
            value = step_values[j];                                                                                             \
            const TYPE filled = (TYPE)fmax(fmin(own + value, LARGEST), -LARGEST);                                               \
            for (const int64_t end = step_ends[j] + 1; t < end; t++) to[t] = filled;                                            \
        }                                                                                                                       \
        const TYPE tail = (TYPE)fmax(fmin(tail_last ? own + value : own, LARGEST), -LARGEST);                                   \
        for (; t < length; t++) to[t] = tail;                                                                                   \
    } while (0)

void grpo_expand_steps(const double *step_values, const int64_t *step_offsets, const int64_t *step_ends, const int64_t *start,
                       const int64_t *stop, int64_t n_completions, const double *base, int tail_last, void *out, int out_is_double)
{
    for (int64_t i = 0; i < n_completions; i++) {
        const double own = base ? base[i] : 0;
        const int64_t length = stop[i] - start[i];
        if (out_is_double)
            EXPAND(double, DBL_MAX);
        else
            EXPAND(float, (double)FLT_MAX);
    }
}

void grpo_count_tokens(const uint8_t *mask, const int64_t *start, const int64_t *stop, int64_t n_completions, int64_t *out)
{
    for (int64_t i = 0; i < n_completions; i++) {
        int64_t count = 0;
        for (int64_t t = start[i]; t < stop[i];) { /* in runs that a byte-wide counter holds */
            const int64_t end = stop[i] - t < 4096 ? stop[i] : t + 4096;
            uint32_t some = 0;
            for (; t < end; t++) some += mask[t] != 0;
            count += some;
        }
        out[i] = count;
    }
}
