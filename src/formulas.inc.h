/* Every native formula, on one point. Included once per instruction set and per REAL; FN(name) makes the names.
 *
 * To add a surrogate: its function and its line in SURROGATES. To add a KL estimator: the same in KLS. */

/* exp(x), exp(x) - 1 and exp(x) - 1 - x, none by a subtraction that cancels.
 *
 * 1. hold x in +-bound   2. n = round(x / ln 2), but 0 where |x| <= 1   3. r = x - n ln 2, in two parts
 * 4. q(r) = (exp(r) - 1 - r) / r^2 by a polynomial that is good on [-1, 1]   5. exp(x) = 2^n (1 + r + r^2 q)
 * Where n = 0 the other two are r + r^2 q and r^2 q. Constants: tools/exp_coefficients.py; errors: tests/test_exp.py. */
typedef struct {
    REAL exp, expm1, tail;
} FN(Exp);

static INLINE FN(Exp) FN(exp)(REAL x, REAL bound)
{
    REAL s = x > bound ? bound : x;
    s = s < -bound ? -bound : s;
    REAL t = s * EXP_LOG2E + EXP_MAGIC;
    t = ABS(s) <= 1 ? EXP_MAGIC : t;
    const REAL n = t - EXP_MAGIC;
    const REAL r = (s - n * EXP_LN2_HI) - n * EXP_LN2_LO;
    const REAL rrq = r * r * EXP_Q(r);
    UINT bits;
    REAL two_n;
    memcpy(&bits, &t, sizeof bits); /* the low bits of t are n */
    bits = (bits << EXP_MANTISSA) + EXP_ONE;
    memcpy(&two_n, &bits, sizeof bits);
    const REAL p = r + rrq;
    const REAL e = two_n + two_n * p;
    const int near = n == 0;
    return (FN(Exp)){e, near ? p : e - 1, near ? rrq : (e - 1) - x};
}

/* An integer that orders as x does, NaN beyond either end: clang has no vectors for a minimum of floats. */
static INLINE INT FN(rank)(REAL x)
{
    INT bits;
    memcpy(&bits, &x, sizeof bits);
    return bits ^ (bits < 0 ? INT_LARGEST : 0);
}

static INLINE REAL FN(unrank)(INT bits)
{
    REAL x;
    bits ^= bits < 0 ? INT_LARGEST : 0;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* ---- surrogates: f(lam, logp, old_logp, A) with its slopes; r = exp(lam) ---- */

typedef struct {
    REAL value, dlam, dlogp;
} FN(Slopes);

#define SURROGATE(name) static INLINE FN(Slopes) FN(name)(REAL lam, REAL r, REAL logp, REAL old_logp, REAL a, const REAL *p)
#define UNUSED(x) (void)(x)

/* -min(r A, clip(r) A) with delta or dual clip; p: lower bound, upper for A > 0, upper for A < 0 */
SURROGATE(clip)
{
    UNUSED(lam), UNUSED(logp), UNUSED(old_logp);
    const REAL low = a > 0 ? 0 : p[0], high = a > 0 ? p[1] : p[2];
    REAL held = r > low ? r : low;
    held = held < high ? held : high;
    return (FN(Slopes)){-a * held, held == r ? -a * r : 0, 0};
}

/* -stop_gradient(clip(r)) A logp; p: bounds */
SURROGATE(cispo)
{
    UNUSED(lam), UNUSED(old_logp);
    REAL w = r > p[0] ? r : p[0];
    w = w < p[1] ? w : p[1];
    return (FN(Slopes)){-w * a * logp, 0, -w * a};
}

/* -A sigmoid(tau (r - 1)) 4 / tau; p: tau for A > 0, tau otherwise */
SURROGATE(sapo)
{
    UNUSED(lam), UNUSED(logp), UNUSED(old_logp);
    const REAL tau = a > 0 ? p[0] : p[1], peak = a > 0 ? 4 / p[0] : 4 / p[1];
    const REAL e = FN(exp)(-tau * (r - 1), EXP_WIDEST).exp, s = 1 / (1 + e);
    return (FN(Slopes)){-a * s * peak, -4 * a * s * (e * s) * r, 0};
}

/* -A logp */
SURROGATE(gpg)
{
    UNUSED(lam), UNUSED(r), UNUSED(old_logp), UNUSED(p);
    return (FN(Slopes)){-a * logp, 0, -a};
}

#undef SURROGATES
#define SURROGATES(CASE) CASE(0, clip) CASE(1, cispo) CASE(2, sapo) CASE(3, gpg)

/* ---- KL estimators of d = ref_logp - logp, with the slope in logp ---- */

typedef struct {
    REAL value, slope;
} FN(Kl);

static INLINE FN(Kl) FN(k1)(REAL d, REAL bound) { UNUSED(bound); return (FN(Kl)){-d, 1}; }
static INLINE FN(Kl) FN(k2)(REAL d, REAL bound) { UNUSED(bound); return (FN(Kl)){d * d / 2, -d}; }
static INLINE FN(Kl) FN(k3)(REAL d, REAL bound)
{
    const FN(Exp) e = FN(exp)(d, bound);
    return (FN(Kl)){e.tail, -e.expm1};
}
static INLINE FN(Kl) FN(kabs)(REAL d, REAL bound)
{
    UNUSED(bound);
    return (FN(Kl)){d < 0 ? -d : d, d < 0 ? 1 : d > 0 ? -1 : 0};
}

#undef KLS
#define KLS(CASE) CASE(1, k1) CASE(2, k2) CASE(3, k3) CASE(4, kabs)
