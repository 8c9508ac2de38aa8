/* What the extension module calls. */
#ifndef GRPO_FAST_NATIVE_H
#define GRPO_FAST_NATIVE_H

#include "contract.h"

void grpo_policy_loss(const Plan *plan, const Batch *batch, int n_threads);
void grpo_tokens(int kind, const TokenCall *call, int n_threads); /* a TOKEN_ kind */

int grpo_n_isas(void);
const char *grpo_isa_name(int k);
int grpo_isa_runs(int k);
int grpo_isa(void);          /* the one in use */
void grpo_select_isa(int k); /* one that runs */

#endif
