/* A small pool of threads that help whoever calls. The caller works too, and never waits for a helper that
 * has not started: a helper that wakes up late finds the job closed. A forked child starts without helpers. */
#ifndef GRPO_FAST_THREADS_H
#define GRPO_FAST_THREADS_H

#include <stdint.h>

/* Runs task(context, k) for k = 0 .. n_tasks - 1, each once, on at most n_threads threads; returns when all are done. */
void grpo_parallel(void (*task)(void *, int64_t), void *context, int64_t n_tasks, int n_threads);

/* Whether this platform has threads for it. */
int grpo_has_threads(void);

#endif
