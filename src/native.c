/* One call: completions over threads, passes over completions, chunks in order. */
#include "native.h"
#include "dispatch.h"
#include "threads.h"

static ATOMIC int isa = -1; /* chosen by the first call; several may be first at once */

int grpo_n_isas(void) { return N_ISAS; }
const char *grpo_isa_name(int k) { return ISAS[k].name; }
int grpo_isa_runs(int k) { return isa_runs(k); }
void grpo_select_isa(int k) { isa = k; }
int grpo_isa(void)
{
    int k = isa;
    if (k >= 0) return k;
    for (k = N_ISAS - 1; !isa_runs(k);) k--;
    isa = k;
    return k;
}

/* A completion on its way: its chunks are worked on in windows, and added up in their order. */
enum { WINDOW = 64 };

typedef struct {
    const Plan *plan;
    const Batch *batch;
    const Loops *loops;
    int n_threads;      /* for the chunks of one completion */
    int64_t i, first_chunk;
    Shared shared;
    union {
        Reduced reduced[WINDOW];
        Sums sums[WINDOW];
    } part;
} Job;

static int64_t chunk_start(const Job *job, int64_t chunk) { return job->batch->start[job->i] + chunk * CHUNK; }
static int64_t chunk_stop(const Job *job, int64_t chunk)
{
    const int64_t end = chunk_start(job, chunk) + CHUNK, stop = job->batch->stop[job->i];
    return end < stop ? end : stop;
}

static void reduce_task(void *context, int64_t k)
{
    Job *job = context;
    const int64_t chunk = job->first_chunk + k;
    job->loops->reduce(job->plan, job->batch, job->i, &job->shared, chunk_start(job, chunk), chunk_stop(job, chunk),
                       &job->part.reduced[k]);
}

static void main_task(void *context, int64_t k)
{
    Job *job = context;
    const int64_t chunk = job->first_chunk + k;
    (job->batch->logp.is_double ? job->loops->main_f64 : job->loops->main_f32)(
        job->plan, job->batch, job->i, &job->shared, chunk_start(job, chunk), chunk_stop(job, chunk), &job->part.sums[k]);
}

/* The main pass once more, in float64 and with what finish_task would add: what was saturated cannot be added to. */
static void wide_task(void *context, int64_t k)
{
    Job *job = context;
    const int64_t chunk = job->first_chunk + k;
    Sums again;
    job->loops->main_f64(job->plan, job->batch, job->i, &job->shared, chunk_start(job, chunk), chunk_stop(job, chunk), &again);
}

static void finish_task(void *context, int64_t k)
{
    Job *job = context;
    const int64_t chunk = job->first_chunk + k;
    job->loops->finish(job->plan, job->batch, job->i, &job->shared, chunk_start(job, chunk), chunk_stop(job, chunk));
}

/* Runs a pass over all chunks; between windows, add() takes what they left in job->part. */
static void pass(Job *job, void (*task)(void *, int64_t), void (*add)(const Job *, int64_t, void *), void *total)
{
    const int64_t length = job->batch->stop[job->i] - job->batch->start[job->i], chunks = (length + CHUNK - 1) / CHUNK;
    for (job->first_chunk = 0; job->first_chunk < chunks; job->first_chunk += WINDOW) {
        const int64_t left = chunks - job->first_chunk, n = left < WINDOW ? left : WINDOW;
        grpo_parallel(task, job, n, job->n_threads);
        if (add) add(job, n, total);
    }
}

static void add_reduced(const Job *job, int64_t n, void *into)
{
    Reduced *total = into;
    for (int64_t k = 0; k < n; k++) {
        const Reduced *part = &job->part.reduced[k];
        total->pre += part->pre, total->x += part->x, total->count += part->count, total->log_weight += part->log_weight;
    }
}

static void add_sums(const Job *job, int64_t n, void *into)
{
    Sums *total = into;
    for (int64_t k = 0; k < n; k++) {
        const Sums *part = &job->part.sums[k];
        for (int s = 0; s < N_SUMS; s++) total->stats[s] += part->stats[s];
        total->stats[STAT_NON_FINITE] += part->stats[STAT_NON_FINITE];
        total->stats[STAT_LOG_RATIO_MIN] = fmin(total->stats[STAT_LOG_RATIO_MIN], part->stats[STAT_LOG_RATIO_MIN]);
        total->stats[STAT_LOG_RATIO_MAX] = fmax(total->stats[STAT_LOG_RATIO_MAX], part->stats[STAT_LOG_RATIO_MAX]);
        total->slopes += part->slopes;
        total->saturated |= part->saturated;
    }
}

static double saturated_exp(double x, double bound) { return exp(fmin(fmax(x, -bound), bound)); }

/* The log-ratio, weight and rho that all tokens of the completion share. */
static void share(const Plan *plan, Shared *shared, const Reduced *sums)
{
    const double n = fmax(sums->count, 1);
    double lam = plan->reduce == REDUCE_MEAN ? sums->pre / n : sums->pre;
    if (plan->weight_use == USE_LOG_OFFSET) lam += sums->log_weight;
    const double log_mean = sums->log_weight / n; /* NaN stays, and shows in the sums */
    if (plan->weight_use != USE_MULTIPLY)
        shared->surrogate_weight = plan->weight_use != USE_GEOMETRIC_MEAN ? 1
                                   : log_mean != log_mean                 ? log_mean
                                                                          : saturated_exp(log_mean, plan->exp_bound);
    shared->lam = lam != lam ? lam : fmin(fmax(lam, plan->lam_lo), plan->lam_hi);
    shared->lam_slope = shared->lam == lam;
    shared->log_rho = sums->x / n;
    shared->rho = saturated_exp(shared->log_rho, plan->exp_bound);
    shared->r = saturated_exp(shared->lam, plan->exp_bound);
}

/* The ratio statistics of a completion that has one ratio. */
static void one_ratio(const Plan *plan, const Shared *shared, double count, double *stats)
{
    for (int s = STAT_LOG_RATIO; s <= STAT_RATIO_SQ; s++) stats[s] = 0;
    stats[STAT_LOG_RATIO_MIN] = INFINITY, stats[STAT_LOG_RATIO_MAX] = -INFINITY;
    if (count == 0) return;
    const double bound = plan->exp_bound, held = fmin(fmax(shared->lam, -bound), bound);
    const double series = held * held * (0.5 + held * (1.0 / 6 + held * (1.0 / 24 + held / 120))); /* of exp(x) - 1 - x */
    stats[STAT_LOG_RATIO] = stats[STAT_LOG_RATIO_MIN] = stats[STAT_LOG_RATIO_MAX] = shared->lam;
    stats[STAT_APPROX_KL] = fabs(held) < 1e-3 ? series : expm1(held) - shared->lam;
    stats[STAT_RATIO] = shared->r;
    stats[STAT_RATIO_SQ] = shared->r * shared->r;
    stats[STAT_CLIP_LOW] /= count;
    stats[STAT_CLIP_HIGH] /= count;
}

static void completion(Job *job)
{
    const Plan *plan = job->plan;
    const Batch *batch = job->batch;
    const int64_t i = job->i;
    const int shared_rho = plan->rho != RHO_NONE && plan->rho_level != LEVEL_TOKEN, shared_lam = plan->level != LEVEL_TOKEN;
    job->shared = (Shared){
        .weight = batch->weights[i],
        .kl_weight = plan->beta * (batch->kl_weights ? batch->kl_weights : batch->weights)[i],
        .advantage = batch->advantages ? batch->advantages[i] : 0,
        .surrogate_weight = batch->completion_weight ? batch->completion_weight[i] : 1,
        .rho = 1,
        .r = 1,
    };
    Reduced reduced = {0, 0, 0, 0};
    if (shared_lam || shared_rho || plan->weight_use != USE_MULTIPLY) {
        pass(job, reduce_task, add_reduced, &reduced);
        share(plan, &job->shared, &reduced);
    }
    Sums sums = {{0}, 0, 0};
    sums.stats[STAT_LOG_RATIO_MIN] = INFINITY, sums.stats[STAT_LOG_RATIO_MAX] = -INFINITY;
    pass(job, main_task, add_sums, &sums);
    if (shared_lam) one_ratio(plan, &job->shared, reduced.count, sums.stats);
    memcpy(batch->stats + i * N_STATS, sums.stats, sizeof sums.stats);

    const int spread_lam = plan->level == LEVEL_SEQUENCE, spread_rho = plan->rho == RHO_RATIO && plan->rho_level == LEVEL_SEQUENCE;
    if (!batch->grad || !(spread_lam || spread_rho)) return;
    const double n = fmax(reduced.count, 1);
    if (spread_lam) job->shared.lam_share = job->shared.weight * job->shared.lam_slope * sums.slopes / (plan->reduce == REDUCE_MEAN ? n : 1);
    if (spread_rho) job->shared.rho_share = job->shared.kl_weight * sums.stats[STAT_KL] / n;
    if (job->shared.lam_share == 0 && job->shared.rho_share == 0) return;
    pass(job, sums.saturated ? wide_task : finish_task, 0, 0);
}

static int is_long(const Batch *batch, int64_t i, int64_t tokens, int n_threads)
{
    const int64_t length = batch->stop[i] - batch->start[i];
    return n_threads > 1 && length > CHUNK && length > tokens / (2 * (int64_t)n_threads);
}

typedef struct {
    Job job;
    int64_t tokens;
    int n_threads;
} Call;

static void completion_task(void *context, int64_t i)
{
    const Call *call = context;
    if (is_long(call->job.batch, i, call->tokens, call->n_threads)) return; /* done, by all threads together */
    Job job = {.plan = call->job.plan, .batch = call->job.batch, .loops = call->job.loops, .n_threads = 1, .i = i};
    completion(&job);
}

void grpo_policy_loss(const Plan *plan, const Batch *batch, int n_threads)
{
    Call call = {.job = {.plan = plan, .batch = batch, .loops = ISAS[grpo_isa()].loops, .n_threads = n_threads}, .n_threads = n_threads};
    for (int64_t i = 0; i < batch->n_completions; i++) call.tokens += batch->stop[i] - batch->start[i];
    for (int64_t i = 0; n_threads > 1 && i < batch->n_completions; i++)
        if (is_long(batch, i, call.tokens, n_threads)) {
            call.job.i = i;
            completion(&call.job);
        }
    grpo_parallel(completion_task, &call, batch->n_completions, n_threads);
}

typedef struct {
    void (*loop)(const TokenCall *, int64_t);
    const TokenCall *call;
} TokenJob;

static void token_task(void *context, int64_t i)
{
    const TokenJob *job = context;
    job->loop(job->call, i);
}

void grpo_tokens(int kind, const TokenCall *call, int n_threads)
{
    TokenJob job = {ISAS[grpo_isa()].loops->tokens[kind], call};
    grpo_parallel(token_task, &job, call->n_completions, n_threads);
}
