"""A user's own surrogate: the numbers of the built-in it restates, errors, and the check of its slopes."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import plans
import pytest

import grpo_fast as gf
from grpo_fast import _backends, _numpy, custom
from grpo_fast import _contract as c
from grpo_fast.tables import SURROGATES

needs_numba = pytest.mark.skipif(_backends.why_not("numba") is not None, reason=str(_backends.why_not("numba")))
DTYPES = pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])


def clip(lam, logp, old_logp, A, params):  # type: ignore[no-untyped-def]
    r = math.exp(lam)
    held = min(r, params[1]) if A > 0 else max(r, params[0])
    return -A * held, -A * r if held == r else 0.0, 0.0


def cispo(lam, logp, old_logp, A, params):  # type: ignore[no-untyped-def]
    weight = min(max(math.exp(lam), params[0]), params[1])
    return -weight * A * logp, 0.0, -weight * A


def cispo_detached(lam, logp, old_logp, A, params, lam0, logp0):  # type: ignore[no-untyped-def]
    return cispo(lam0, logp, old_logp, A, params)[0]


def explosive(lam, logp, old_logp, A, params):  # type: ignore[no-untyped-def]
    """Beyond float32 for ordinary numbers, within float64."""
    huge = math.exp(params[0] + lam)
    return -A * huge, -A * huge, 0.0


def run(
    plan: c.Plan, batch: c.Batch, dtype: Any, own: custom.Custom | None = None, n_threads: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    grad = np.zeros(len(batch.logp), dtype)
    stats = np.full((len(batch.start), len(c.STATS)), np.nan)
    kernels = _backends.get("numba") if own is None else own.kernels
    kernels.policy_loss(plan, batch, grad, stats, n_threads, own)
    return grad, stats


def as_custom(plan: c.Plan, own: custom.Custom) -> c.Plan:
    p0, p1, p2, p3 = own.params
    return plan._replace(surrogate=c.SURROGATE_CUSTOM, p0=p0, p1=p1, p2=p2, p3=p3)


def close(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    finite = np.isfinite(want)
    np.testing.assert_array_equal(got[~finite], want[~finite])
    size = max(np.abs(want[finite]).max(initial=0.0), 1e-30)
    assert np.abs(got[finite] - want[finite]).max(initial=0.0) <= tolerance * size


@needs_numba
@DTYPES
@pytest.mark.parametrize(
    ("function", "name", "params"), [(clip, "clip", (0.8, 1.2)), (cispo, "cispo", (0.8, 1.2))], ids=["clip", "cispo"]
)
def test_restated_it_gives_the_numbers_of_the_built_in(function: Any, name: str, params: Any, dtype: Any) -> None:
    own = custom.prepare(function, params)
    for seed in range(8):
        rng = np.random.default_rng([31, seed])
        plan = plans.plan(rng, name, c.LEVEL_TOKEN, dtype)
        batch = plans.batch(rng, plan, dtype)
        want = run(plan, batch, dtype)
        got = run(as_custom(plan, own), batch, dtype, own)
        shared = run(as_custom(plan, own), batch, dtype, own, n_threads=2)
        for a, b, again in zip(got, want, shared, strict=True):
            close(a, b, 1e-12 if dtype == np.float64 else 1e-6)
            np.testing.assert_array_equal(a, again)


@needs_numba
def test_a_compiled_function_and_a_lambda() -> None:
    import numba

    rng = np.random.default_rng(5)
    plan = plans.plan(rng, "gpg", c.LEVEL_TOKEN, np.float64)
    batch = plans.batch(rng, plan, np.float64)
    want = run(plan, batch, np.float64)
    for function in (
        numba.njit(lambda lam, logp, old_logp, A, params: (-A * logp, 0, -A)),
        lambda lam, logp, old_logp, A, params: (-A * logp, 0.0, -A),
    ):
        own = custom.prepare(function)
        for a, b in zip(run(as_custom(plan, own), batch, np.float64, own), want, strict=True):
            close(a, b, 1e-12)


@needs_numba
def test_what_float32_cannot_hold_is_done_over_in_float64() -> None:
    own = custom.prepare(explosive, 100.0)
    rng = np.random.default_rng(2)
    plan = as_custom(plans.plan(rng, "gpg", c.LEVEL_TOKEN, np.float32, pre=c.PRE_IDENTITY, kl=c.KL_NONE), own)
    batch = plans.batch(rng, plan, np.float32)._replace(weights=np.full(len(plans.LENGTHS), 1e-20))
    grad, stats = run(plan, batch, np.float32, own)
    double = batch._replace(
        **{k: v.astype(np.float64) for k in ("logp", "old_logp") if (v := getattr(batch, k)) is not None}
    )
    want_grad, want = run(plan, double, np.float64, own)
    assert np.abs(want_grad).max() > 1e20
    np.testing.assert_allclose(grad, want_grad, rtol=1e-6)
    np.testing.assert_allclose(stats[:, 0], want[:, 0], rtol=1e-6)


@needs_numba
@DTYPES
def test_nan_is_an_error_that_names_the_token(dtype: Any) -> None:
    def broken(lam, logp, old_logp, A, params):  # type: ignore[no-untyped-def]
        return (-A * logp, 0.0, math.nan if -9 < logp < -7 else -A)

    own = custom.prepare(broken)
    logp = np.full(40, -1.0, dtype)
    logp[23] = -8.0
    batch = c.Batch(
        np.array([0, 20]), np.array([20, 40]), logp, None, None, None, None, None, np.ones(2), None, None, None, None,
        np.ones(2),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"loss_type: broken gives NaN or inf at token 23 of completion 1, lam=0, "):
        run(c.Plan(c.SURROGATE_CUSTOM), batch, dtype, own)


def one_far_token(at: int, lam: float, dtype: Any) -> c.Batch:
    """Two completions of 150 tokens on policy, but one."""
    logp = np.full(300, -1.0, dtype)
    old_logp = logp.copy()
    old_logp[at] -= lam
    return c.Batch(
        np.array([0, 150]), np.array([150, 300]), logp, old_logp, None, None, None, None, np.ones(2), None, None, None,
        None, np.ones(2),
    )  # fmt: skip


TABLE = np.arange(4.0)


@needs_numba
@DTYPES
@pytest.mark.parametrize("kind", ["helper", "key", "params", "table"])
def test_what_raises_in_the_loop_is_an_error_that_names_the_token(
    kind: str, dtype: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Not a block of whatever was in the memory, with the exception printed and ignored."""
    import numba

    @numba.njit
    def limited(x):  # type: ignore[no-untyped-def]
        if x == 57:
            raise ValueError("too far")
        return x

    def helper(lam, logp, old_logp, A, params):  # type: ignore[no-untyped-def]
        return -A * limited(lam), -A, 0.0

    def key(lam, logp, old_logp, A, params):  # type: ignore[no-untyped-def]
        known = {0: 1.0}
        return -A * logp, 0.0, -A * known[1 if lam == 57 else 0]

    def parameter(lam, logp, old_logp, A, params):  # type: ignore[no-untyped-def]
        return -A * logp, params[7 if lam == 57 else 0], -A

    def table(lam, logp, old_logp, A, params):  # type: ignore[no-untyped-def]
        return -A * logp, TABLE[1 << 60 if lam == 57 else 0], -A

    function, quoted = {
        "helper": (helper, "ValueError (too far)"),
        "key": (key, "KeyError (1)"),
        "params": (parameter, "IndexError (tuple index out of range)"),
        "table": (table, "IndexError (index 1152921504606846976 is out of bounds for axis 0 with size 4)"),
    }[kind]
    own = custom.prepare(function, 0.5)
    run(c.Plan(c.SURROGATE_CUSTOM), one_far_token(170, 56.0, dtype), dtype, own)
    with pytest.raises(ValueError, match="loss_type: ") as raised:
        run(c.Plan(c.SURROGATE_CUSTOM), one_far_token(170, 57.0, dtype), dtype, own)
    sentence = f"raises {quoted} at token 170 of completion 1, lam=57, logp=-1, old_logp=-58, A=1, "
    assert sentence in str(raised.value)
    assert "ignored" not in capfd.readouterr().err


def test_it_is_tried_far_off_policy() -> None:
    for bound in (5, 50, 200, -5, -50, -200):

        def far(lam, logp, old_logp, A, params):  # type: ignore[no-untyped-def]
            return (math.nan if lam / params[0] > 1 else 0.0), 0.0, 0.0

        with pytest.raises(ValueError, match=r"far returns \(nan, 0.0, 0.0\) at lam=-?[13]0"):
            custom.prepare(far, bound)


def test_it_is_tried_at_a_certain_token() -> None:
    """As masked tokens look to it, which no error could name."""
    with pytest.raises(ValueError, match=r"raises ValueError \(math domain error\) at lam=0, logp=0, "):
        custom.prepare(lambda lam, logp, old_logp, A, params: (math.log(-logp), 0.0, 1 / logp))


def test_parameters_that_are_read_must_be_given() -> None:
    sentence = "loss_params: clip reads params and none were given; pass up to four numbers"
    with pytest.raises(ValueError) as raised:
        gf.grpo_loss([-1.0], [-1.0], None, [1.0], [0, 1], loss_type=clip)
    assert str(raised.value) == sentence
    with pytest.raises(ValueError, match=r"^params: clip reads params and none were given"):
        gf.check_surrogate_gradient(clip)

    def own_bounds(lam, logp, old_logp, A, params):  # type: ignore[no-untyped-def]
        params = (0.8, 1.2)
        return clip(lam, logp, old_logp, A, params)

    assert gf.check_surrogate_gradient(own_bounds).ok  # it never reads what is passed


def test_the_check_of_slopes_checks_its_own_arguments() -> None:
    for name, value in (("n", -5), ("n", 0), ("seed", -1), ("tolerance", -1.0)):
        with pytest.raises(ValueError, match=rf"^{name}: expected .*, got {value}"):
            gf.check_surrogate_gradient(clip, (0.8, 1.2), **{name: value})
    assert gf.check_surrogate_gradient.__name__ == "check_surrogate_gradient"


def test_a_report_that_fails_mentions_detached() -> None:
    assert "or pass detached= if" in str(gf.check_surrogate_gradient(cispo, (0.8, 1.2)))
    assert "detached" not in str(gf.check_surrogate_gradient(cispo, (0.8, 1.2), detached=cispo_detached))


def asserting(lam, logp, old_logp, A, params):  # type: ignore[no-untyped-def]
    assert A != 0
    return 0.0, 0.0, 0.0


class Callable:
    def __call__(self, *arguments: Any) -> tuple[float, float, float]:
        return 0.0, 0.0, 0.0


@pytest.mark.parametrize(
    ("function", "error", "sentence"),
    [
        (3, TypeError, "loss_type: expected a name or a function, got 3; pass f(lam, logp, old_logp, A, params)"),
        (Callable(), TypeError, "Callable; write it with def or lambda"),
        (lambda lam, logp: (0.0, 0.0, 0.0), TypeError, "does not take the 5 arguments of f(lam"),
        (lambda *a: (0.0, 0.0), TypeError, "return a tuple of three numbers"),
        (lambda *a: 0.0, TypeError, "return a tuple of three numbers"),
        (lambda *a: ("a", 0.0, 0.0), TypeError, "return a tuple of three numbers"),
        (lambda *a: (math.inf, 0.0, 0.0), ValueError, "must give finite numbers"),
        (lambda lam, logp, old_logp, A, p: (1 / A, 0.0, 0.0), ValueError, "raises ZeroDivisionError"),
        (asserting, ValueError, "raises (or asserts), which a loop over tokens cannot; return math.nan"),
    ],
)
def test_errors_name_the_argument_and_a_way_out(function: Any, error: type[Exception], sentence: str) -> None:
    with pytest.raises(error) as raised:
        custom.prepare(function)
    assert str(raised.value).startswith("loss_type: ")
    assert sentence in str(raised.value)


@needs_numba
def test_what_numba_cannot_compile() -> None:
    def printing(lam, logp, old_logp, A, params):  # type: ignore[no-untyped-def]
        open  # noqa: B018
        return (float(str(A)[:1] == "-") * 0.0, 0.0, len({**{}}) * 0.0)

    with pytest.raises(
        TypeError, match=r"loss_type: Numba cannot compile printing for float64: .*; use numbers, the math module"
    ):
        custom.prepare(printing)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ((1, 2, 3, 4, 5), "at most 4 numbers, got 5"),
        ((1.0, math.nan), "entry 1 is nan"),
        (("a",), "entry 0 is 'a'"),
        ([[1], [2, 3]], "[[1], [2, 3]] is no list of numbers; pass up to four numbers"),
        ([1, 10**400], "entry 1 is 1000"),
    ],
)
def test_parameters(params: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match="loss_params: ") as raised:
        custom.prepare(clip, params)
    assert sentence in str(raised.value)


@needs_numba
def test_other_backends_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"backend: a function as loss_type runs on 'numba' only, got 'numpy'; "):
        custom.prepare(clip, (0.8, 1.2), backend="numpy")
    monkeypatch.setenv("GRPO_FAST_BACKEND", "numpy")
    with pytest.raises(ValueError, match="got 'numpy'"):
        custom.prepare(clip, (0.8, 1.2))


def test_without_numba_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = f"{_backends._WAY_OUT['numba']} (No module named 'numba')"
    monkeypatch.setattr(_backends, "why_not", lambda name: reason if name == "numba" else None)
    with pytest.raises(_backends.BackendUnavailable, match=r"pip install 'grpo-fast\[numba\]'"):
        custom.prepare(clip, (0.8, 1.2))


# ---- the check of slopes -----------------------------------------------------------------------------


def restated(name: str, params: tuple[float, ...]) -> tuple[Any, Any]:
    """A built-in by the oracle, and its value with constants where the source detaches."""
    formula = _numpy.SURROGATES[SURROGATES[name].id]

    def call(lam: float, r: float, logp: float, old_logp: float, A: float) -> Any:
        return [float(x[0]) for x in formula(*(np.array([x]) for x in (lam, r, logp, old_logp, A)), params)]

    def function(lam: float, logp: float, old_logp: float, A: float, params: Any) -> Any:
        return tuple(call(lam, math.exp(lam), logp, old_logp, A))

    def detached(lam: float, logp: float, old_logp: float, A: float, params: Any, lam0: float, logp0: float) -> Any:
        if name not in ("cispo", "vespo", "dppo_tv", "dppo_kl"):
            return function(lam, logp, old_logp, A, params)[0]
        return call(lam0, math.exp(lam0), logp0, old_logp, A)[2] * logp  # -weight A logp

    return function, detached


@pytest.mark.parametrize("name", SURROGATES)
def test_the_oracle_passes(name: str) -> None:
    bounds = SURROGATES[name].bounds(**plans.REQUIRED.get(name, {}))
    params = (*bounds.params, 0.0, 0.0, 0.0, 0.0)[:4]
    function, detached = restated(name, params)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = custom.check_surrogate_gradient(function, detached=detached, n=300, raise_error=True)
    assert report.ok and report.n_compared > 500 and report.n_kinks < 50


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_wrong_slope_is_found(which: int, sign: float) -> None:
    """In either slope, for advantages of either sign only."""

    def wrong(lam, logp, old_logp, A, params):  # type: ignore[no-untyped-def]
        r = math.exp(lam)
        slopes = [-A * r, params[0] * 2 * logp]
        if A * sign > 0:
            slopes[which] *= 1.001
        return -A * r + params[0] * logp**2, slopes[0], slopes[1]

    report = custom.check_surrogate_gradient(wrong, 0.5)
    assert not report.ok
    assert report.worst["slope"] == ("d/dlam", "d/dlogp")[which]
    assert report.worst["A"] * sign > 0
    with pytest.raises(
        ValueError, match=r"function: wrong has a slope that is not its value's: .* at lam=.*; correct it"
    ):
        custom.check_surrogate_gradient(wrong, 0.5, raise_error=True)


def test_nan_slopes_are_found() -> None:
    report = custom.check_surrogate_gradient(
        lambda lam, logp, old, A, p: (A * lam, math.nan if 3 < lam < 10 else A, 0.0), n=2000
    )
    assert report.max_error == math.inf


def test_what_is_detached_needs_saying() -> None:
    params = (0.8, 1.2)
    assert not custom.check_surrogate_gradient(cispo, params).ok
    assert custom.check_surrogate_gradient(cispo, params, detached=cispo_detached).ok
    with pytest.raises(ValueError, match=r"or pass detached="):
        custom.check_surrogate_gradient(cispo, params, raise_error=True)
    with pytest.raises(ValueError, match=r"detached: its value at lam=.* make it the same formula"):
        custom.check_surrogate_gradient(cispo, params, detached=lambda lam, logp, old, A, p, lam0, logp0: -A * logp)


def test_kinks_are_counted_and_a_value_of_nothing_else_is_refused() -> None:
    def steps(lam, logp, old_logp, A, params):  # type: ignore[no-untyped-def]
        return math.floor((lam + logp) / params[0]), 0.0, 0.0

    report = custom.check_surrogate_gradient(steps, 1e-4)
    assert report.ok and 0.1 < report.n_kinks / (report.n_kinks + report.n_compared) < 0.4
    with pytest.raises(ValueError, match="too many to compare; make the value a continuous function"):
        custom.check_surrogate_gradient(steps, 3e-5)


def test_the_report_reads() -> None:
    text = str(custom.check_surrogate_gradient(clip, (0.8, 1.2)))
    assert "slopes compared" in text and "largest error" in text


# ---- through the public function ---------------------------------------------------------------------


@needs_numba
@DTYPES
def test_as_a_loss_type(dtype: Any) -> None:
    """The loss, the gradient and the metrics of the method it restates, KL and mask included."""
    rng = np.random.default_rng(9)
    offsets = np.array([0, 300, 300, 811])
    logp = -rng.exponential(1.0, 811)
    arrays = [values.astype(dtype) for values in (logp, logp - rng.normal(0, 0.3, 811), logp + rng.normal(0, 0.3, 811))]
    options: dict[str, Any] = {"mask": rng.random(811) < 0.8, "beta": 0.1, "loss_agg_mode": "token-mean"}
    advantages = rng.normal(0, 1, 3)
    want = gf.grpo_loss(*arrays, advantages, offsets, loss_type="dapo", backend="numba", **options)
    got = gf.grpo_loss(*arrays, advantages, offsets, loss_type=clip, loss_params=(0.8, 1.2), **options)
    assert want.grad is not None and got.grad is not None
    close(got.grad, want.grad, 1e-12 if dtype == np.float64 else 1e-6)
    assert got.loss == pytest.approx(want.loss, rel=1e-12 if dtype == np.float64 else 1e-6)
    shared = [name for name in want.metrics if not name.startswith("clip_ratio/")]  # no bounds, nothing to count
    for name in shared:
        assert got.metrics[name] == pytest.approx(want.metrics[name], rel=1e-6, abs=1e-12), name
