"""Print the constants of the exp that the C and the Numba backend share: ``python tools/exp_coefficients.py``.

exp(x) = 2^n (1 + p),  p = r + r^2 q(r),  r = x - n ln2_hi - n ln2_lo,  n = 0 where |x| <= 1, else round(x / ln2).

q approximates (exp(r) - 1 - r) / r^2 on [-1, 1], best in the relative sense: a least-squares fit at Chebyshev nodes,
which is near-minimax. The coefficients are rounded to the target precision one by one, the lowest first, and the
remaining ones fitted again after each, so that rounding costs next to nothing. The first is exactly 1/2.
"""

from __future__ import annotations

import struct

import mpmath as mp

mp.mp.prec = 200


def q(r: mp.mpf) -> mp.mpf:
    """(exp(r) - 1 - r) / r^2, by its series."""
    term, total, k = mp.mpf(1) / 2, mp.mpf(0), 2
    while abs(term) > mp.mpf(2) ** -150:
        total, k = total + term, k + 1
        term = term * r / k
    return total


def rounded(value: mp.mpf, bits: int) -> mp.mpf:
    with mp.workprec(bits):
        return +value


def fit(degree: int, bits: int, nodes: int = 200) -> list[mp.mpf]:
    points = [mp.cos((2 * k + 1) * mp.pi / (2 * nodes)) for k in range(nodes)]
    exact = [q(r) for r in points]
    fixed = [mp.mpf(1) / 2]
    while len(fixed) <= degree:
        powers = range(len(fixed), degree + 1)
        rows = mp.matrix([[r**k / e for k in powers] for r, e in zip(points, exact, strict=True)])
        rest = mp.matrix([(e - mp.polyval(fixed[::-1], r)) / e for r, e in zip(points, exact, strict=True)])
        fixed.append(rounded(mp.lu_solve(rows, rest)[0], bits))
    return fixed


def relative_error(coefficients: list[mp.mpf], points: int = 2001) -> mp.mpf:
    grid = [mp.mpf(2 * k) / (points - 1) - 1 for k in range(points)]
    return max(abs(mp.polyval(coefficients[::-1], r) / q(r) - 1) for r in grid)


def show(name: str, value: mp.mpf, single: bool) -> None:
    number = float(value)
    assert number == value
    if single:
        number = struct.unpack("f", struct.pack("f", number))[0]
        assert number == value
    digits = 9 if single else 17
    print(f"    {name:8} {number:+.{digits - 1}e}  {number.hex()}")


def main() -> None:
    for name, bits, degree, hi_bits, magic in (
        ("float32", 24, 7, 16, 12582912.0),
        ("float64", 53, 13, 42, 6755399441055744.0),
    ):
        single = bits == 24
        coefficients = fit(degree, bits)
        error = relative_error(coefficients)
        hi = rounded(mp.ln(2), hi_bits)
        ulp = error * 2 ** (bits - 1)
        print(f"{name}: degree {degree}, relative error of q {mp.nstr(error, 3)}, {mp.nstr(ulp, 3)} ULP")
        show("magic", mp.mpf(magic), single)
        show("log2e", rounded(1 / mp.ln(2), bits), single)
        show("ln2_hi", hi, single)
        show("ln2_lo", rounded(mp.ln(2) - hi, bits), single)
        for k, c in enumerate(coefficients):
            show(f"q{k}", c, single)


if __name__ == "__main__":
    main()
