#include "threads.h"

#if defined(__unix__) || defined(__APPLE__)
#define GRPO_FAST_PTHREADS 1
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#endif

static void serial(void (*task)(void *, int64_t), void *context, int64_t n_tasks)
{
    for (int64_t k = 0; k < n_tasks; k++) task(context, k);
}

#ifndef GRPO_FAST_PTHREADS

int grpo_has_threads(void) { return 0; }

void grpo_parallel(void (*task)(void *, int64_t), void *context, int64_t n_tasks, int n_threads)
{
    (void)n_threads;
    serial(task, context, n_tasks);
}

#else

enum { MAX_HELPERS = 255, TURNS_BEFORE_SLEEP = 2000, TURNS_BEFORE_WAITING = 3200 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER, done = PTHREAD_COND_INITIALIZER;
static int helpers;             /* threads that exist; all below is guarded by lock, but for the atomics */
static int open_places;         /* helpers the open job still takes; 0: no job */
static int busy;                /* a caller owns the job below */
static void (*job_task)(void *, int64_t);
static void *job_context;
static int64_t job_tasks, job_share;
static _Atomic int64_t job_next;
static atomic_int job_helpers;  /* helpers at work on it */
static atomic_uint job_number;  /* grows with every job, for helpers that watch for the next one */

int grpo_has_threads(void) { return 1; }

static void work(void)
{
    for (;;) {
        const int64_t first = atomic_fetch_add_explicit(&job_next, job_share, memory_order_relaxed);
        if (first >= job_tasks) return;
        const int64_t stop = first + job_share < job_tasks ? first + job_share : job_tasks;
        for (int64_t k = first; k < stop; k++) job_task(job_context, k);
    }
}

static void pause_briefly(int turn)
{
    if (turn % 16 == 15) sched_yield();
#if defined(__x86_64__) || defined(__i386__)
    else __builtin_ia32_pause();
#endif
}

static void *help(void *unused)
{
    (void)unused;
    unsigned seen = 0;
    pthread_mutex_lock(&lock);
    for (;;) {
        if (!open_places) {
            /* The next call often comes at once: watch for it a moment before sleeping. */
            seen = atomic_load(&job_number);
            pthread_mutex_unlock(&lock);
            for (int turn = 0; turn < TURNS_BEFORE_SLEEP && atomic_load(&job_number) == seen; turn++) pause_briefly(turn);
            pthread_mutex_lock(&lock);
            while (!open_places) pthread_cond_wait(&wake, &lock);
        }
        open_places--;
        atomic_fetch_add(&job_helpers, 1);
        pthread_mutex_unlock(&lock);
        work();
        pthread_mutex_lock(&lock);
        if (atomic_fetch_sub(&job_helpers, 1) == 1) pthread_cond_signal(&done);
    }
    return 0;
}

static void forget_helpers(void) /* in a forked child: no thread but the caller survived */
{
    pthread_mutex_init(&lock, 0);
    pthread_cond_init(&wake, 0);
    pthread_cond_init(&done, 0);
    helpers = open_places = busy = 0;
    atomic_store(&job_helpers, 0);
}

/* With the lock held. Fewer than wanted where the system refuses. */
static void start_helpers(int wanted)
{
    static int registered;
    if (!registered) registered = !pthread_atfork(0, 0, forget_helpers);
    if (!registered || helpers >= wanted) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of the program */
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    for (pthread_t thread; helpers < wanted && helpers < MAX_HELPERS; helpers++)
        if (pthread_create(&thread, &attributes, help, 0)) break;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

void grpo_parallel(void (*task)(void *, int64_t), void *context, int64_t n_tasks, int n_threads)
{
    if (n_threads > n_tasks) n_threads = (int)n_tasks;
    if (n_threads < 2) {
        serial(task, context, n_tasks);
        return;
    }
    pthread_mutex_lock(&lock);
    if (busy) { /* another thread of the program has the helpers */
        pthread_mutex_unlock(&lock);
        serial(task, context, n_tasks);
        return;
    }
    busy = 1;
    start_helpers(n_threads - 1);
    job_task = task, job_context = context, job_tasks = n_tasks;
    job_share = n_tasks / (16 * (int64_t)n_threads) + 1;
    atomic_store(&job_next, 0);
    open_places = helpers < n_threads - 1 ? helpers : n_threads - 1;
    atomic_fetch_add(&job_number, 1);
    pthread_cond_broadcast(&wake);
    pthread_mutex_unlock(&lock);

    work();

    pthread_mutex_lock(&lock);
    open_places = 0;
    pthread_mutex_unlock(&lock);
    for (int turn = 0; turn < TURNS_BEFORE_WAITING && atomic_load(&job_helpers); turn++) pause_briefly(turn);
    pthread_mutex_lock(&lock);
    while (atomic_load(&job_helpers)) pthread_cond_wait(&done, &lock);
    busy = 0;
    pthread_mutex_unlock(&lock);
}

#endif
