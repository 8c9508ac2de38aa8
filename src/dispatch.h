/* The loops, once per instruction set, and the choice between them at run time. */
#ifndef GRPO_FAST_DISPATCH_H
#define GRPO_FAST_DISPATCH_H

#include "contract.h"
#include <float.h>

#if defined(_MSC_VER)
#define INLINE __inline
#define ALWAYS_INLINE __forceinline
#define ALIGNED __declspec(align(64))
#define UNREACHABLE __assume(0)
#define ATOMIC volatile
#define restrict __restrict
#else
#define INLINE inline __attribute__((always_inline))
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))
#define UNREACHABLE __builtin_unreachable()
#define ATOMIC _Atomic
#endif

#define LANES 16 /* float32 lanes of the widest vectors: loops are whole multiples of it on every instruction set */
#define FLUSH 64 /* tokens after which the staged loops flush their sums */
#define FUSED_SURROGATE 0
#define FUSED_KL 3

typedef struct {
    void (*reduce)(const Plan *, const Batch *, int64_t, const Shared *, int64_t, int64_t, Reduced *);
    void (*finish)(const Plan *, const Batch *, int64_t, const Shared *, int64_t, int64_t);
    void (*main_f64)(const Plan *, const Batch *, int64_t, const Shared *, int64_t, int64_t, Sums *);
    void (*main_f32)(const Plan *, const Batch *, int64_t, const Shared *, int64_t, int64_t, Sums *);
    void (*tokens[N_TOKEN_KINDS])(const TokenCall *, int64_t);
} Loops;

#define ISA base
#define FUSED_FLUSH 64 /* sixteen terms a lane */
#include "isa.inc.h"

#if (defined(__x86_64__) || defined(_M_X64)) && (defined(__GNUC__) || defined(__clang__))
#define GRPO_FAST_X86_LEVELS 1
#define DO_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define TARGET_BEGIN(features) DO_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define TARGET_END DO_PRAGMA(clang attribute pop)
#else
#define TARGET_BEGIN(features) DO_PRAGMA(GCC push_options) DO_PRAGMA(GCC target(features))
#define TARGET_END DO_PRAGMA(GCC pop_options)
#endif

TARGET_BEGIN("avx2,fma,bmi,bmi2")
#define ISA v3
#define FUSED_FLUSH 128
#include "isa.inc.h"
TARGET_END

#if defined(__clang__)
TARGET_BEGIN("avx2,fma,bmi,bmi2,avx512f,avx512bw,avx512cd,avx512dq,avx512vl")
#else /* gcc would use 256-bit vectors without being told */
TARGET_BEGIN("avx2,fma,bmi,bmi2,avx512f,avx512bw,avx512cd,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define ISA v4
#define FUSED_FLUSH 256
#include "isa.inc.h"
TARGET_END
#endif

static const struct {
    const char *name;
    const Loops *loops;
} ISAS[] = {
    {"baseline", &loops_base_all},
#ifdef GRPO_FAST_X86_LEVELS
    {"x86-64-v3", &loops_v3_all},
    {"x86-64-v4", &loops_v4_all},
#endif
};
enum { N_ISAS = sizeof ISAS / sizeof ISAS[0] };

/* Whether this CPU and its operating system run ISAS[k]. */
static int isa_runs(int k)
{
#ifdef GRPO_FAST_X86_LEVELS
    __builtin_cpu_init();
    const int v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi")
                   && __builtin_cpu_supports("bmi2");
    const int v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
                   && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return k == 0 || (k == 1 && v3) || (k == 2 && v4);
#else
    return k == 0;
#endif
}

#endif
