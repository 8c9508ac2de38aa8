"""The shared cases (``shared/cases/*.json`` beside the repository), each on every backend.

A case runs when the library has its function, its arguments and the names it uses; the others are
skipped with what is missing. :data:`EXECUTED` is how many run today: fewer means something was lost.
GRPO_FAST_CASES names another folder.
"""

from __future__ import annotations

import builtins
import inspect
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import grpo_fast as gf
from grpo_fast import conventions, tables

#: Cases that run now. Raise it when more do.
EXECUTED = 239


def _folder() -> Path | None:
    here = Path(__file__).resolve()
    places = [Path(os.environ["GRPO_FAST_CASES"])] if "GRPO_FAST_CASES" in os.environ else []
    places += [parent / "shared" / "cases" for parent in here.parents[1:]]
    return next((place for place in places if (place / "README.md").is_file()), None)


def _load() -> list[dict[str, Any]]:
    folder = _folder()
    if folder is None:
        return []
    return [case for path in sorted(folder.glob("*.json")) for case in json.loads(path.read_text(encoding="utf-8"))]


CASES = _load()

#: Arguments whose values are names, and where the library lists them.
NAMES: dict[str, Any] = {
    "loss_type": tables.METHODS,
    "loss_agg_mode": tables.AGGREGATIONS,
    "importance_sampling_level": tables.LEVELS,
    "kl_ratio_factor": tables.KL_RATIO_FACTORS,
    "kl_estimator": [name + plus for name in tables.KL_ESTIMATORS for plus in ("", "+")],
    "advantage_level": tables.ADVANTAGE_LEVELS,
    "baseline": tables.BASELINES,
    "scale": tables.SCALES,
    "singleton": tables.SINGLETONS,
    "nan_policy": tables.NAN_POLICIES,
    "step_form": tables.STEP_FORMS,
    "normalize": tables.POOLS,
    "tail": tables.TAILS,
    "credit": tables.CREDITS,
}


def _function(name: str) -> Any:
    function: Any = gf
    for part in name.split("."):
        function = getattr(function, part, None)
    return function


def _keywords(function: Any) -> set[str]:
    """Names of a function's arguments, those of an unpacked TypedDict included."""
    names: set[str] = set()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            names |= _keywords(gf.grpo_loss)
        else:
            names.add(parameter.name)
    return names


def _missing(case: dict[str, Any]) -> str | None:
    """What the library lacks for a case, or None."""
    call = case["call"]
    function = _function(call["function"])
    if function is None:
        return f"{call['function']} does not exist yet"
    known = _keywords(function)
    if "convention" in call:
        if "convention" not in known:
            return f"{call['function']} takes no convention yet ({call['convention']})"
        if call["convention"] not in conventions.CONVENTIONS:
            return f"convention {call['convention']!r} is not in the tables yet"
    for name, value in call["args"].items():
        if name not in known:
            return f"{call['function']} has no argument {name} yet"
        if name in NAMES and isinstance(value, str) and value not in NAMES[name]:
            return f"{name}={value!r} is not in the tables yet"
    return None


RUNNING = [case for case in CASES if _missing(case) is None]


def test_number_of_cases_that_run() -> None:
    if not CASES:
        pytest.skip("no folder shared/cases beside the repository; GRPO_FAST_CASES can name one")
    assert len({case["id"] for case in CASES}) == len(CASES)
    assert len(RUNNING) >= EXECUTED, f"{len(RUNNING)} of {len(CASES)} cases run, {EXECUTED} did"


#: Arrays of numbers, which may hold "nan" and "inf"; other arguments pass as they are written.
NUMBERS = {
    "rewards", "logp", "old_logp", "ref_logp", "sampling_logp", "advantages", "token_weight", "step_rewards", "step_advantages",
    "token_rewards", "outcome_rewards", "reward_weights", "mask", "token_offsets", "step_offsets", "step_ends", "lengths",
    "group_offsets", "terms", "weights", "truncated", "correct", "token_ids",
}  # fmt: skip
WHOLE = {"token_offsets", "step_offsets", "step_ends", "lengths", "group_offsets", "token_ids"}


def _number(value: Any) -> Any:
    return [_number(v) for v in value] if isinstance(value, list) else float(value) if isinstance(value, str) else value


def _argument(name: str, value: Any, dtypes: dict[str, str]) -> Any:
    if name not in NUMBERS or value is None:
        return value
    kind = dtypes.get(
        name, "int64" if name in WHOLE else "bool" if name in ("mask", "truncated", "correct") else "float64"
    )
    if kind == "bfloat16":
        return np.array(_number(value), np.float64).astype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.array(_number(value)).astype(kind)


def _prepared(call: dict[str, Any]) -> dict[str, Any]:
    dtypes = call.get("dtypes", {})
    prepared = {name: _argument(name, value, dtypes) for name, value in call["args"].items()}
    if "convention" in call:
        prepared["convention"] = call["convention"]
    return prepared


def _outcome(function: Any, arguments: dict[str, Any], backend: str) -> dict[str, Any]:
    """Value, gradient, metrics and mask of a call, by the keys of ``expect``."""
    if "backend" in inspect.signature(function).parameters:
        arguments = {**arguments, "backend": backend}
    result = function(**arguments)
    if hasattr(result, "loss"):
        return {"value": result.loss, "grad": result.grad, "metrics": result.metrics}
    if not isinstance(result, tuple):
        return {"value": result}
    names = {"kl": ("value", "grad"), "importance_weights": ("value", "mask", "metrics")}.get(
        function.__name__, ("value", "metrics")
    )
    return dict(zip(names, result, strict=True))


def _agree(found: Any, expected: Any, rtol: float, atol: float, say: str) -> None:
    found, expected = np.asarray(found).astype(np.float64), np.array(_number(expected), np.float64)
    assert found.shape == expected.shape, say
    off = np.abs(found - expected) > atol + rtol * np.abs(expected)
    assert not off.any(), f"{say}: {found[off]} is not {expected[off]}"


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_case(case: dict[str, Any], backend: str) -> None:
    missing = _missing(case)
    if missing is not None:
        pytest.skip(missing)
    call, expect = case["call"], case["expect"]
    function, arguments = _function(call["function"]), _prepared(call)
    if "raises" in expect:
        with pytest.raises(getattr(builtins, expect["raises"])):
            _outcome(function, arguments, backend)
        return
    unknown = set(expect) - {
        "value", "grad", "grad_or", "mask", "metrics", "finite", "rtol", "atol", "value_rtol", "dtype", "grad_dtype", "nonnegative"
    }  # fmt: skip
    assert not unknown, f"the runner does not know {unknown}"
    rtol, atol = expect["rtol"], expect["atol"]
    outcome = _outcome(function, arguments, backend)

    if call["function"] in ("importance_weights", "off_policy_weights") and "value" in expect:
        expect = _of_removed_slots(expect, outcome, arguments)
    if "value" in expect:
        _agree(outcome["value"], expect["value"], expect.get("value_rtol", rtol), atol, "value")
    if "grad" in expect:
        gradients = [expect["grad"], *([expect["grad_or"]] if "grad_or" in expect else [])]
        errors = []
        for gradient in gradients:
            try:
                _agree(outcome["grad"], gradient, rtol, atol, "grad")
                break
            except AssertionError as error:
                errors.append(error)
        else:
            raise errors[0]
    if "mask" in expect:
        _agree(outcome["mask"], expect["mask"], 0.0, 0.0, "mask")
    for name, value in expect.get("metrics", {}).items():
        _agree(outcome["metrics"][name], value, rtol, atol, f"metrics[{name!r}]")
    if expect.get("finite"):
        for key in ("value", "grad"):
            if outcome.get(key) is not None:
                assert np.isfinite(np.asarray(outcome[key]).astype(np.float64)).all(), f"{key} is not finite"
    if expect.get("nonnegative"):
        assert (np.asarray(outcome["value"]) >= 0).all()
    if "dtype" in expect:
        assert np.asarray(outcome["value"]).dtype.name == expect["dtype"]
    if "grad_dtype" in expect:
        assert outcome["grad"].dtype.name == expect["grad_dtype"]
    for cut in call.get("splits", []):
        _cut(function, arguments, cut, expect, backend)


def _of_removed_slots(expect: dict[str, Any], outcome: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """One weight per completion stands for all its tokens; slots that are removed are not compared."""
    value = np.asarray(outcome["value"])
    lengths = np.diff(arguments["token_offsets"])
    if len(value) == len(lengths) != len(expect["value"]):
        value = np.repeat(value, lengths)
    wanted = np.array(_number(expect["value"]), np.float64)
    removed = ~np.asarray(arguments.get("mask", np.ones(len(wanted), bool)), bool)
    outcome["value"] = np.where(removed, wanted, value)
    return expect


def _cut(function: Any, arguments: dict[str, Any], cut: list[list[int]], expect: dict[str, Any], backend: str) -> None:
    """The parts of a batch, with the same denominators, add up to what the whole should give."""
    offsets = arguments["token_offsets"]
    total, gradient = 0.0, np.full(offsets[-1], np.nan)
    for part in cut:
        slots = np.concatenate([np.arange(offsets[i], offsets[i + 1]) for i in part])
        piece = dict(arguments, token_offsets=np.cumsum([0, *(offsets[i + 1] - offsets[i] for i in part)]))
        for name in ("logp", "old_logp", "ref_logp", "mask", "token_weight"):
            if piece.get(name) is not None:
                piece[name] = arguments[name][slots]
        rows = slots if arguments.get("advantage_level") == "token" else part
        piece["advantages"] = arguments["advantages"][rows]
        assert "step_ends" not in piece and "group_ids" not in piece, "the runner does not cut these"
        outcome = _outcome(function, piece, backend)
        total += outcome["value"]
        gradient[slots] = outcome["grad"]
    _agree(total, expect["value"], expect["rtol"], expect["atol"], f"cut {cut}")
    _agree(gradient, expect["grad"], expect["rtol"], expect["atol"], f"cut {cut}, grad")
