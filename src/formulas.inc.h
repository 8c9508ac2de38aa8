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

/* -A r + p0 |lam| */
SURROGATE(ratio)
{
    UNUSED(logp), UNUSED(old_logp);
    const REAL side = lam > 0 ? 1 : lam < 0 ? -1 : 0;
    return (FN(Slopes)){p[0] * (side * lam) - a * r, p[0] * side - a * r, 0};
}

/* -stop_gradient(exp(l + k lam - l r)) A logp; p: k and l for A >= 0, k and l otherwise */
SURROGATE(vespo)
{
    UNUSED(old_logp);
    const REAL k = a >= 0 ? p[0] : p[2], rate = a >= 0 ? p[1] : p[3];
    const REAL x = rate + k * lam - rate * r;
    REAL phi = FN(exp)(x < VESPO_TOP ? x : VESPO_TOP, EXP_WIDEST).exp;
    phi = x < -EXP_WIDEST ? 0 : x > VESPO_TOP ? VESPO_BEYOND : phi;
    return (FN(Slopes)){-phi * a * logp, 0, -phi * a};
}

/* -stop_gradient(min(r, cap)) A logp of the tokens with room left, which is a number as the vectors are of numbers */
static INLINE FN(Slopes) FN(dppo)(REAL room, REAL r, REAL logp, REAL a, REAL cap)
{
    const REAL least = r < cap ? r : cap, w = room >= 0 ? least : 0;
    return (FN(Slopes)){-w * a * logp, 0, -w * a};
}

/* ... up to the bound on how far the probability moved; p: bound for A <= 0, bound for A > 0, cap */
SURROGATE(dppo_tv)
{
    UNUSED(lam);
    const REAL now = logp < 0 ? logp : 0, before = old_logp < 0 ? old_logp : 0;
    const REAL moved = FN(exp)(now, EXP_WIDEST).exp - FN(exp)(before, EXP_WIDEST).exp;
    return FN(dppo)(a > 0 ? p[1] - moved : p[0] + moved, r, logp, a, p[2]);
}

/* ... up to the bound h on the binary KL, or where the probability moved against A; p as above. With q and p the
 * probabilities before and now and e = 1e-8, q (old_logp - logp) + (1 - q) log((1 - q + e) / (1 - p + e)) <= h is
 * (1 - q + e) <= (1 - p + e) exp((h - q (old_logp - logp)) / (1 - q)): the ratio lies within 1e-8 and 1e8, where no exp
 * saturates, and where 1 - q is 0 only the sign of the numerator matters */
SURROGATE(dppo_kl)
{
    UNUSED(lam);
    const REAL now = logp < 0 ? logp : 0, before = old_logp < 0 ? old_logp : 0, e = (REAL)1e-8;
    const FN(Exp) q = FN(exp)(before, EXP_WIDEST);
    const REAL not_p = -FN(exp)(now, EXP_WIDEST).expm1, not_q = -q.expm1, h = a > 0 ? p[1] : p[0];
    const REAL left = (h - q.exp * (old_logp - logp)) / (not_q > REAL_TINY ? not_q : REAL_TINY);
    const REAL room = (not_p + e) * FN(exp)(left, EXP_WIDEST).exp - (not_q + e), back = a > 0 ? before - now : now - before;
    return FN(dppo)(room > back ? room : back, r, logp, a, p[2]);
}

/* -A logp + p0 / 2 lam^2 */
SURROGATE(dro)
{
    UNUSED(r), UNUSED(old_logp);
    return (FN(Slopes)){p[0] * lam * lam / 2 - a * logp, p[0] * lam, -a};
}

#undef SURROGATES
#define SURROGATES(CASE)                                                                                      \
    CASE(0, clip) CASE(1, cispo) CASE(2, sapo) CASE(3, gpg) CASE(4, ratio) CASE(5, vespo) CASE(6, dppo_tv)      \
    CASE(7, dppo_kl) CASE(8, dro)

/* ---- KL estimators of d = ref_logp - logp, with the slope in logp, and the sum of the two, which is the slope
 * under a ratio factor and would cancel ---- */

typedef struct {
    REAL value, slope, both;
} FN(Kl);

static INLINE FN(Kl) FN(k1)(REAL d, REAL bound) { UNUSED(bound); return (FN(Kl)){-d, 1, 1 - d}; }
static INLINE FN(Kl) FN(k2)(REAL d, REAL bound) { UNUSED(bound); return (FN(Kl)){d * d / 2, -d, d * d / 2 - d}; }
static INLINE FN(Kl) FN(k3)(REAL d, REAL bound)
{
    const FN(Exp) e = FN(exp)(d, bound);
    return (FN(Kl)){e.tail, -e.expm1, -d};
}
static INLINE FN(Kl) FN(kabs)(REAL d, REAL bound)
{
    UNUSED(bound);
    const REAL size = d < 0 ? -d : d, slope = d < 0 ? 1 : d > 0 ? -1 : 0;
    return (FN(Kl)){size, slope, size + slope};
}

#undef KLS
#define KLS(CASE) CASE(1, k1) CASE(2, k2) CASE(3, k3) CASE(4, kabs)
