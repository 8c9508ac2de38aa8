/* All loops for one instruction set, whose name is ISA: float64 first, since float32 falls back on it. */

#define PASTE_(name, isa, real) name##_##isa##_##real
#define PASTE(name, isa, real) PASTE_(name, isa, real)

#define REAL double
#define ABS fabs
#define REAL_IS_DOUBLE 1
#define UINT uint64_t
#define INT int64_t
#define INT_LARGEST INT64_MAX
#define FN(name) PASTE(name, ISA, f64)
#define EXP_MAGIC 6755399441055744.0
#define EXP_LOG2E 1.4426950408889634
#define EXP_LN2_HI 0.69314718055989033
#define EXP_LN2_LO 5.4979230187083712e-14
#define EXP_MANTISSA 52
#define EXP_ONE 0x3ff0000000000000u
#define EXP_WIDEST 700.0
#define REAL_TINY DBL_MIN
#define VESPO_TOP 300.0
#define VESPO_BEYOND phi
#define EXP_Q(r)                                                                                                       \
    (0.5 + r * (0.16666666666666663 + r * (0.041666666666666276 + r * (0.0083333333333342526 + r * (0.0013888888888965120   \
    + r * (1.9841269840591670e-4 + r * (2.4801587252021241e-5 + r * (2.7557319437104723e-6 + r * (2.7557334036181729e-7     \
    + r * (2.5052077289061759e-8 + r * (2.0874521162171655e-9 + r * (1.6060883305661821e-10 + r * (1.1636484633620386e-11   \
    + r * 7.6482264426699210e-13)))))))))))))
#include "formulas.inc.h"
#include "blocks.inc.h"
#include "tokens.inc.h"
#undef REAL
#undef ABS
#undef REAL_IS_DOUBLE
#undef UINT
#undef INT
#undef INT_LARGEST
#undef FN
#undef EXP_MAGIC
#undef EXP_LOG2E
#undef EXP_LN2_HI
#undef EXP_LN2_LO
#undef EXP_MANTISSA
#undef EXP_ONE
#undef EXP_WIDEST
#undef REAL_TINY
#undef VESPO_TOP
#undef VESPO_BEYOND
#undef EXP_Q

#define REAL float
#define ABS fabsf
#define REAL_IS_DOUBLE 0
#define UINT uint32_t
#define INT int32_t
#define INT_LARGEST INT32_MAX
#define FN(name) PASTE(name, ISA, f32)
#define WIDE(name) PASTE(name, ISA, f64)
/* Log-ratios, factors and sums beyond these go through float64: in float32 their products might overflow. */
#define WIDE_LOG 40.0f
#define WIDE_FACTOR 1e15f
#define WIDE_SUM 1e30
#define EXP_MAGIC 12582912.0f
#define EXP_LOG2E 1.44269502f
#define EXP_LN2_HI 0.693145752f
#define EXP_LN2_LO 1.42860677e-6f
#define EXP_MANTISSA 23
#define EXP_ONE 0x3f800000u
#define EXP_WIDEST 87.0f
#define REAL_TINY FLT_MIN
#define VESPO_TOP EXP_WIDEST
#define VESPO_BEYOND INFINITY /* no sum is finite then, and float64 decides */
#define EXP_Q(r)                                                                                                       \
    (0.5f + r * (0.166666672f + r * (0.0416667163f + r * (0.00833329652f + r * (0.00138858333f + r * (1.98469206e-4f        \
    + r * (2.53324160e-5f + r * 2.75523303e-6f)))))))
#include "formulas.inc.h"
#include "fused.inc.h"
#include "blocks.inc.h"
#undef REAL
#undef ABS
#undef REAL_IS_DOUBLE
#undef UINT
#undef INT
#undef INT_LARGEST
#undef FN
#undef WIDE
#undef WIDE_LOG
#undef WIDE_FACTOR
#undef WIDE_SUM
#undef EXP_MAGIC
#undef EXP_LOG2E
#undef EXP_LN2_HI
#undef EXP_LN2_LO
#undef EXP_MANTISSA
#undef EXP_ONE
#undef EXP_WIDEST
#undef REAL_TINY
#undef VESPO_TOP
#undef VESPO_BEYOND
#undef EXP_Q

static const Loops PASTE(loops, ISA, all) = {
    PASTE(reduce_chunk, ISA, f64), PASTE(finish_chunk, ISA, f64), PASTE(main_chunk, ISA, f64), PASTE(main_chunk, ISA, f32),
    {PASTE(gae, ISA, f64), PASTE(moments, ISA, f64), PASTE(affine, ISA, f64), PASTE(mismatch, ISA, f64),
     PASTE(mismatch_weights, ISA, f64), PASTE(mismatch_keep, ISA, f64)}, /* by TOKEN_ kind */
};
#undef PASTE
#undef PASTE_
#undef ISA
#undef FUSED_FLUSH
