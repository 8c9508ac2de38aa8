"""explain: what two conventions set, in words and numbers, and that nothing that differs is left out."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import grpo_fast.conventions as conventions
from grpo_fast.explain import Explanation, Row, explain
from grpo_fast.tables import METHODS

NAMES = list(conventions.CONVENTIONS)
PAIRS = list(itertools.combinations(NAMES, 2))
NUMBERS = (
    "advantages of an example", "loss of an example", "KL of the example", "importance weights of an example",
    "KL in the reward of an example",
)  # fmt: skip


@cache
def between(a: str, b: str) -> Explanation:
    return explain(a, b, backend="numpy")


def by_name(explanation: Explanation, section: str) -> dict[str, Row]:
    return {row.name: row for row in explanation.rows if row.section == section}


@pytest.mark.parametrize("name", NAMES)
def test_itself(name: str) -> None:
    alike = explain(name, name)
    assert alike.differences == ()
    assert str(alike).endswith("no line differs")
    alone = explain(name)
    assert [(row.section, row.name, row.words, row.a) for row in alone] == [
        (row.section, row.name, row.words, row.a) for row in alike
    ]
    assert alone.differences == ()


@pytest.mark.parametrize(("a", "b"), PAIRS, ids="-".join)
def test_every_documented_difference_shows(a: str, b: str) -> None:
    found = between(a, b)
    left, right = conventions.convention(a), conventions.convention(b)
    advantages, loss, weights = (by_name(found, section) for section in ("advantages", "loss", "importance weights"))
    for name in {*left.advantages, *right.advantages}:
        values = [row.advantages.get(name) for row in (left, right)]
        undivided = any(row.advantages["scale"] == "none" for row in (left, right)) and name in ("ddof", "eps")
        if None not in values and values[0] != values[1] and not undivided:
            assert advantages[name].differs, name
            assert (advantages[name].a, advantages[name].b) == tuple(values)
    options = [row.loss_options(row.loss_type) for row in (left, right)]
    for name in {*options[0], *options[1]}:
        values = [of.get(name) for of in options]
        if None not in values and values[0] != values[1]:
            assert loss[name].differs, name
    assert loss["loss_type"].differs == (left.loss_type != right.loss_type)
    rewards = by_name(found, "KL in the reward")
    of_rewards = [row.reward_kl_options() for row in (left, right)]
    for name in {*of_rewards[0], *of_rewards[1]}:
        assert (rewards[name].a, rewards[name].b) == tuple(of.get(name) for of in of_rewards)
        assert rewards[name].differs == (of_rewards[0].get(name) != of_rewards[1].get(name)), name
    for name in {*left.corrections, *right.corrections}:
        values = [row.corrections.get(name) for row in (left, right)]
        assert weights[name].differs == (values[0] != values[1]), name


@pytest.mark.parametrize(("a", "b"), PAIRS, ids="-".join)
def test_text(a: str, b: str) -> None:
    found, turned = between(a, b), explain(b, a, backend="numpy")
    assert {(row.section, row.name) for row in found.differences} == {
        (row.section, row.name) for row in turned.differences
    }
    text = str(found)
    assert text.isascii()
    lines = text.splitlines()
    assert sum(line.startswith("* ") for line in lines) == len(found.differences)
    for row in found.differences:
        line = next(line for line in lines[lines.index(row.section.upper()) :] if line.startswith(f"* {row.name}  "))
        assert row.words in line
    starts = {line.index(row.words) for row in found.differences for line in lines if line.endswith(f"  {row.words}")}
    assert len(starts) <= 2  # words stand in a column; a cell that is cut is as wide as the column


def test_shown_numbers_differ_where_numbers_do() -> None:
    found = explain("openrlhf", "nemo-rl")
    for line in str(found).splitlines():
        if line.startswith("* winner"):
            cells = line.split()
            assert cells[2] != cells[3]
            return
    raise AssertionError("no such line")


def test_numbers_are_shown_with_seven_digits() -> None:
    line = next(line for line in str(explain("verl")).splitlines() if line.startswith("  winner "))
    assert line.split()[1] == "1.499997"


def test_numbers_are_those_of_the_library() -> None:
    found = by_name(explain("trl", "verl"), "advantages of an example")
    np.testing.assert_allclose((found["winner"].a, found["winner"].b), (0.75 / (0.5 + 1e-4), 0.75 / (0.5 + 1e-6)))
    np.testing.assert_allclose((found["alone"].a, found["alone"].b), (0.0, 1 / (1 + 1e-6)))
    np.testing.assert_allclose(found["beside a missing one"].a, 0.5 / (np.sqrt(0.5) + 1e-4))
    assert found["beside a missing one"].b.startswith("refused: ")
    slopes = by_name(explain("trl", "verl"), "loss of an example")
    np.testing.assert_allclose((slopes["ratio 10, A < 0"].a, slopes["ratio 10, A < 0"].b), (10.0, 0.0))
    assert slopes["masked"].a == slopes["masked"].b == 0.0
    kl = by_name(explain("trl", "verl"), "KL of the example")
    d, r = 0.5, 1.1
    np.testing.assert_allclose(kl["reference 0.5 above"].b, 1 - np.exp(d))
    rewards = by_name(explain("trl", "verl"), "KL in the reward of an example")
    np.testing.assert_allclose(
        (rewards["reference 0.5 above"].a, rewards["reference 0.5 above"].b), (1 + 0.05 * d, 1 + 0.001 * d)
    )
    np.testing.assert_allclose(kl["reference 0.5 above"].a, r * (np.exp(d) - d - 1) + r * (1 - np.exp(d)))


def changed(monkeypatch: pytest.MonkeyPatch, field: str, **options: Any) -> list[Row]:
    """The differences between verl and a verl whose row says something else."""
    row = conventions.CONVENTIONS["verl"]
    base = replace(row, name="base", corrections={"mode": "token_truncate", "clip_max": 3.0, "log_ratio_clamp": 20.0})
    other = replace(base, name="other", **{field: {**getattr(base, field), **options}})
    monkeypatch.setitem(conventions.CONVENTIONS, "base", base)
    monkeypatch.setitem(conventions.CONVENTIONS, "other", other)
    return [row for row in explain("base", "other", backend="numpy").differences if row.name != "convention"]


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("advantages", {"baseline": "leave_one_out"}),
        ("advantages", {"scale": "none"}),
        ("advantages", {"ddof": 0}),
        ("advantages", {"eps": 1e-4}),
        ("advantages", {"singleton": "zero"}),
        ("advantages", {"nan_policy": "exclude"}),
        ("loss", {"loss_type": "dapo", "epsilon_high": 0.28}),
        ("loss", {"loss_agg_mode": "seq-mean-token-mean"}),
        ("loss", {"loss_agg_mode": "token-sum"}),
        ("loss", {"epsilon": 0.1}),
        ("loss", {"epsilon_high": 0.272}),
        ("loss", {"epsilon_high": 0.28}),
        ("loss", {"beta": 0.01}),
        ("loss", {"kl_estimator": "k1"}),
        ("loss", {"kl_estimator": "k2"}),
        ("loss", {"kl_estimator": "k3+"}),
        ("loss", {"kl_ratio_factor": "ratio"}),
        ("loss", {"kl_ratio_factor": "ratio_detached"}),
        ("loss", {"kl_agg_mode": "seq-mean-token-mean"}),
        ("kl", {"k3": {"kl_clamp_in": 20.0}}),
        ("kl", {"k3": {"kl_clamp_in": 1.0, "kl_clamp_out": 10.0}}),
        ("kl", {"k3": {"kl_clamp_out": 10.0, "kl_clamp_in": 40.0}}),
        ("levels", {"token": {"dual_clip": 3.0}}),
        ("levels", {"token": {"dual_clip": 5e4, "log_ratio_clamp": 20.0}}),
        ("levels", {"token": {"log_ratio_clamp": 10.0}}),
        ("corrections", {"clip_max": 2.0}),
        ("corrections", {"clip_min": 0.5}),
        ("corrections", {"mode": "token_mask"}),
        ("corrections", {"mode": "sequence_truncate"}),
        ("corrections", {"mode": None}),
        ("reward_kl", {"beta": 0.01}),
        ("reward_kl", {"kl_estimator": "k3"}),
        ("reward_kl", {"kl_clamp_out": 1.0}),
        ("reward_kl", {"kl_clamp_in": 1.0}),
    ],
    ids=str,
)
def test_a_setting_shows_in_a_number(monkeypatch: pytest.MonkeyPatch, field: str, options: dict[str, Any]) -> None:
    found = changed(monkeypatch, field, **options)
    settings = [row for row in found if row.section not in NUMBERS]
    numbers = [row for row in found if row.section in NUMBERS]
    silent = field == "kl" and options["k3"].get("kl_clamp_in") == 40.0  # 20 and 40 are one under an output clamp of 10
    assert settings
    assert bool(numbers) != silent, [row.name for row in found]


def test_rounding_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    found = changed(monkeypatch, "loss", epsilon=0.1, epsilon_high=0.21)
    assert {row.section for row in found} == {"loss", "loss of an example"}


def test_a_method_of_choice() -> None:
    found = explain("trl", "verl", loss_type="cispo")
    rows = by_name(found, "loss")
    assert (rows["loss_type"].a, rows["loss_type"].b) == ("cispo", "cispo")
    assert (rows["cispo_bound"].a, rows["cispo_bound"].b) == ("cap", "relative")
    for name in NAMES:
        for loss_type in conventions.CONVENTIONS[name].methods:
            one = explain(name, loss_type=loss_type, backend="numpy")
            assert by_name(one, "loss")["loss_agg_mode"].a
            assert METHODS[loss_type]


def test_what_is_not_known() -> None:
    with pytest.raises(ValueError, match=r"convention: 'trtl' is not known; did you mean 'trl'\? choose one of"):
        explain("trl", "trtl")
    with pytest.raises(ValueError, match=r"loss_type: verl 0\.9\.1 has no 'luspo'; it has"):
        explain("trl", "verl", loss_type="luspo")
    with pytest.raises(ValueError, match=r"version '0\.1' of trl"):
        explain("trl==0.1")
