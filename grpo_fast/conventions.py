"""Whose numbers: every free choice that a framework makes, as a row per framework and version.

A convention fills in the options that the caller leaves out: an explicit keyword beats the
convention, the convention beats the library's default. Options of a convention that a method has no
use for are dropped; explicit ones raise. What depends on the method is keyed by it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .convention_rows import ROWS
from .tables import METHODS, SURROGATES

Options = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Convention:
    """One framework's free choices; :func:`convention` returns it.

    ``checked`` is "executed" where the framework's own imported functions gave the same numbers
    (tests/parity), "read" where its source was read.
    """

    name: str
    version: str
    source: str
    checked: str
    loss: Options  # loss_type, loss_agg_mode and options that hold for every method
    methods: Mapping[str, Options]  # the loss types it has, with what each changes
    levels: Mapping[str, Options]  # the importance sampling levels of those that take one, with what each changes
    kl: Options = field(default_factory=dict)  # options by KL estimator
    advantages: Options = field(default_factory=dict)  # options of group_advantages
    estimators: Mapping[str, Options] = field(default_factory=dict)  # those it has, with what each changes
    corrections: Options = field(default_factory=dict)  # options of importance_weights
    reward_kl: Options = field(default_factory=dict)  # options of kl_in_reward, where it can put the KL in the reward
    notes: tuple[str, ...] = ()  # where it differs from its own documentation, and what this row does

    @property
    def loss_type(self) -> str:
        """What its users get without choosing."""
        return str(self.loss["loss_type"])

    def levels_of(self, loss_type: str) -> tuple[str, ...]:
        """Importance sampling levels it has for a method; none where the method has its own."""
        row = self.methods[loss_type]
        return tuple(row.get("levels", self.levels)) if "importance_sampling_level" in row else ()

    def loss_options(self, loss_type: str, level: str | None = None, kl_estimator: str | None = None) -> dict[str, Any]:
        """Options of :func:`grpo_fast.grpo_loss` for a method, level and KL estimator; the most specific counts."""
        method = self.methods[loss_type]
        level = level or method.get("importance_sampling_level")
        options = {**self.loss, **self.levels.get(level or "", {}), **method}
        if level is not None:
            options["importance_sampling_level"] = level
        estimator = (kl_estimator or options.get("kl_estimator", "k3")).rstrip("+")
        options |= self.kl.get(estimator, {})
        return {k: v for k, v in options.items() if v is not None and _is_used(loss_type, k)}

    def shared_options(self, kl_estimator: str | None = None) -> dict[str, Any]:
        """What holds whatever the surrogate: of the KL term and of empty rows."""
        names = ("beta", "kl_estimator", "kl_ratio_factor", "kl_clamp_in", "kl_clamp_out", "empty_rows")
        estimator = (kl_estimator or self.loss.get("kl_estimator", "k3")).rstrip("+")
        options = {**self.loss, **self.kl.get(estimator, {})}
        return {name: options[name] for name in names if options.get(name) is not None}

    def reward_kl_options(self, kl_estimator: str | None = None) -> dict[str, Any]:
        """Options of :func:`grpo_fast.kl_in_reward`, with the clamps of the estimator; none where it has no such KL."""
        if not self.reward_kl:
            return {}
        estimator = kl_estimator or self.reward_kl["kl_estimator"]
        return {**self.kl.get(estimator, {}), **self.reward_kl, "kl_estimator": estimator}

    def __str__(self) -> str:
        return f"{self.name}=={self.version} ({self.checked}: {self.source})"


_SURROGATE_OPTIONS = frozenset(name for row in SURROGATES.values() for name in row.options)


def _is_used(loss_type: str, option: str) -> bool:
    surrogate = SURROGATES[METHODS[loss_type].surrogate]
    if option == "log_ratio_clamp":
        return surrogate.ratio and not surrogate.own_clamp
    return option not in ("loss_type", "levels", *(_SURROGATE_OPTIONS - set(surrogate.options)))


CONVENTIONS: dict[str, Convention] = {name: Convention(name=name, **row) for name, row in ROWS.items()}


def convention(name: str) -> Convention:
    """The choices of a framework, by name, such as "trl", or by name and version, such as "trl==1.16.0".

    Parameters
    ----------
    name : a row of ``grpo_fast.conventions.CONVENTIONS``, with or without its version

    Returns
    -------
    Convention
        Print it, or look at ``loss``, ``methods``, ``advantages``, ``corrections``, ``reward_kl`` and ``notes``.

    Raises
    ------
    ValueError, TypeError
        A name or a version the library does not know.

    Examples
    --------
    >>> import grpo_fast as gf
    >>> gf.convention("verl").advantages["eps"]
    1e-06
    """
    if isinstance(name, Convention):
        return name
    if not isinstance(name, str):
        raise TypeError(f"convention: expected a name such as 'trl', got {type(name).__name__}; pass a string or None")
    key, versioned, version = name.partition("==")
    if key not in CONVENTIONS:
        close = difflib.get_close_matches(key.strip().lower(), CONVENTIONS, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"convention: {key!r} is not known; {hint}choose one of {', '.join(map(repr, CONVENTIONS))}")
    row = CONVENTIONS[key]
    if versioned and version != row.version:
        raise ValueError(
            f"convention: version {version!r} of {key} is not known; its numbers here are those of {row.version}: "
            f"pass {key!r} or '{key}=={row.version}'"
        )
    return row


def look_up(name: str | None) -> Convention | None:
    """The convention, or None for None."""
    return None if name is None else convention(name)


def advantage_options(name: str | None, estimator: str | None) -> dict[str, Any]:
    """What a convention sets of :func:`grpo_fast.group_advantages`, for an estimator."""
    row = look_up(name)
    if row is None:
        return {}
    return {**row.advantages, **row.estimators.get(estimator or "grpo", {})}


def correction_options(name: str | None) -> dict[str, Any]:
    """What a convention sets of :func:`grpo_fast.importance_weights`."""
    row = look_up(name)
    return {} if row is None else dict(row.corrections)


def reward_kl_options(name: str | None, kl_estimator: str | None) -> dict[str, Any]:
    """What a convention sets of :func:`grpo_fast.kl_in_reward`, for a KL estimator, or for its own.

    Raises ValueError where the framework cannot put the KL in the reward.
    """
    row = look_up(name)
    if row is None:
        return {}
    if not row.reward_kl:
        raise ValueError(
            f"beta: {row.name} {row.version} puts no KL in the reward and has none to give; leave convention out and "
            f"pass beta, or choose one of {_with_reward_kl()}"
        )
    return row.reward_kl_options(kl_estimator)


def _with_reward_kl() -> str:
    return ", ".join(repr(name) for name, row in CONVENTIONS.items() if row.reward_kl)


def no_reward_kl() -> ValueError:
    """Where nothing tells the coefficient."""
    return ValueError(f"beta: there is no default for it; pass one, or convention= with one of {_with_reward_kl()}")
