"""THE TABLE: a method is a row: how its step differs, what is averaged and how often.

This is the one place where the local step (`optim`) and the synchronisation (`sync`) meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lordo.optim.options import LOCAL_DEFAULTS
from lordo.suggest import unknown
from lordo.sync.exchange import Exchange
from lordo.sync.formats import format_names
from lordo.sync.rules import Average, AverageGradients, FirstBasis, PseudoGradient, Rule
from lordo.sync.schedule import PERIODS

SYNC_DEFAULTS: dict[str, Any] = {
    "sync_every": 32,
    "sync_exp_avg_every": None,
    "sync_exp_avg_sq_every": None,
    "sync_error_every": None,
    "anchor_device": "same",
    "sync_wire": "float32",
    "sync_wire_moments": None,
    "sync_wire_basis": None,
    "sync_split": False,
    "sync_overlap": 0,
    "sync_fragments": 1,
    "outer": "none",
    "outer_lr": 0.7,
    "outer_momentum": 0.9,
}

_ADAM = ("lr", "betas", "eps", "weight_decay", "moment_dtype")
_LOWRANK = ("rank", "basis")
_LOCAL_UPDATE = (
    *("sync_every", "sync_wire", "sync_overlap", "sync_fragments", "anchor_device"),
    *("outer", "outer_lr", "outer_momentum"),
)
_FULLRANK_TERM = ("omega", "error_feedback", "error_dtype", "fullrank_signal", "fullrank_denominator", "sync_error_every")
_MOMENT_PERIODS = ("sync_exp_avg_every", "sync_exp_avg_sq_every")
_MOMENTS = (*_MOMENT_PERIODS, "sync_wire_moments")
_SHARED_BASIS = ("sync_wire_basis", "sync_split")


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        name, summary: what it is called, and one line about it.
        averages_gradients: whether the gradient is averaged at every step (then nothing else is).
        averages: what else is averaged, each every K steps of its own.
        basis_from: "sync" (leading subspace of Δ), "gradient", "momentum"; None where no weight is low-rank.
        settings: what a user may set; anything else is refused.
        defaults: where this row differs from the general defaults; a user's settings go before them.
        moment_periods: periods of the two moments as multiples of K, where they are not K.
        fixed: what makes the row what it is.
    """

    name: str
    summary: str
    averages_gradients: bool = False
    averages: tuple[str, ...] = ()
    basis_from: Literal["sync", "gradient", "momentum"] | None = None
    moment_periods: tuple[int, int] | None = None
    settings: tuple[str, ...] = _ADAM
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def resolve(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All settings of this method, from those given.

        Raises:
            ValueError: a setting that this method does not have, with the nearest name.
        """
        for name in given:
            if name not in self.settings:
                raise ValueError(f"method '{self.name}': {unknown('setting', name, self.settings)}")
        basis_from = {"basis_from": self.basis_from} if self.basis_from else {"rank": None}
        settings = {**LOCAL_DEFAULTS, **SYNC_DEFAULTS, **self.defaults, **given, **basis_from, **self.fixed}
        for name, multiple in zip(_MOMENT_PERIODS, self.moment_periods or (), strict=False):
            if settings[name] is None:
                settings[name] = multiple * settings["sync_every"]
        return settings

    def rules(self, settings: Mapping[str, Any]) -> tuple[list[Rule], list[Rule]]:
        """What is done before and after each local step."""
        before: list[Rule] = []
        after: list[Rule] = []
        if self.averages_gradients:
            before.append(AverageGradients())
        refresh, formats = self.basis_from == "sync", format_names(settings)
        if refresh:
            before.append(FirstBasis(wire=formats["basis"]))
        what = [what for what in PERIODS if what in self.averages or what == "error"]
        follow = PseudoGradient(
            refresh=refresh,
            outer=settings["outer"] == "nesterov",
            anchored=formats["parameters"] != "float32",
            anchor_device=settings["anchor_device"],
            basis_wire=formats["basis"],
        )
        if self.averages and averages_plainly(settings):
            after += [Average(*what), follow]
        elif self.averages:
            after.append(Exchange(*what, settings=settings, then=follow))
        return before, after

    def check_parts(self, settings: Mapping[str, Any]) -> None:
        """Refuse what needs all of a low-rank weight, where each device of a worker has a part of it.

        Raises:
            ValueError: one sentence that names the setting.
        """
        if self.basis_from != "sync":
            raise ValueError(
                f"method '{self.name}' takes bases from its own gradients, of which each device has a part: for workers of several devices "
                "take 'lordo', or a method without low-rank weights"
            )
        if settings["error_feedback"] and settings["error_dtype"] in ("int8", "int6"):
            raise ValueError(
                f"error_dtype={settings['error_dtype']!r} has one scale for each whole column, of which each device has a part: for "
                "workers of several devices take 'bfloat16' or 'float32'"
            )


def averages_plainly(settings: Mapping[str, Any]) -> bool:
    """Whether everything is averaged at once, whole and in full precision."""
    in_full = all(wire == "float32" for what, wire in format_names(settings).items() if what != "basis")
    return in_full and not settings["sync_split"] and settings["sync_overlap"] == 0 and settings["sync_fragments"] == 1


_LORDO_SETTINGS = (*_ADAM, *_LOWRANK, *_LOCAL_UPDATE, *_FULLRANK_TERM, *_MOMENTS, *_SHARED_BASIS)
_EVERYTHING = ("parameters", "exp_avg", "exp_avg_sq")

_DDP_LOWRANK = Method(
    "ddp-lowrank",
    "LDAdam, gradients averaged at every step: a new basis at each step, generalised error feedback",
    averages_gradients=True,
    basis_from="momentum",
    settings=(*_ADAM, "rank", "basis_interpolation", "error_feedback"),
    defaults={"betas": (0.908, 0.99), "basis_interpolation": 0.908, "error_feedback": True},
)

_ROWS = (
    Method(
        "lordo",
        "low-rank Adam, rare averaging, one basis for all from the averaged pseudo-gradient, full-rank term",
        averages=_EVERYTHING,
        basis_from="sync",
        settings=_LORDO_SETTINGS,
        defaults={"omega": None, "error_feedback": True},
    ),
    Method(
        "lordo-paper",
        "lordo with the update as printed and the hyper-parameters reported in the paper",
        averages=_EVERYTHING,
        basis_from="sync",
        settings=_LORDO_SETTINGS,
        defaults={
            "betas": (0.999, 0.999),
            "omega": 0.95,
            "error_feedback": True,
            "fullrank_signal": "gradient",
            "fullrank_denominator": "mean",
        },
    ),
    Method(
        "lordo-local",
        "each worker its own basis from its own gradient, full-rank term inside it; only parameters averaged",
        averages=("parameters",),
        basis_from="gradient",
        settings=(*_ADAM, *_LOWRANK, *_LOCAL_UPDATE, "omega", "error_feedback", "sync_error_every"),
        defaults={"omega": None, "error_feedback": True},
        fixed={"fullrank_signal": "projected"},
    ),
    Method(
        "lordo-global-no-fullrank",
        "lordo without the full-rank term: the basis cannot leave its first subspace",
        averages=_EVERYTHING,
        basis_from="sync",
        settings=(*_ADAM, *_LOWRANK, *_LOCAL_UPDATE, *_MOMENTS, *_SHARED_BASIS),
        fixed={"omega": 1.0, "error_feedback": False},
    ),
    Method("ddp-adamw", "AdamW, gradients averaged at every step", averages_gradients=True),
    _DDP_LOWRANK,
    replace(_DDP_LOWRANK, name="ldadam", summary="ddp-lowrank under its own name, as it is known on one worker"),
    Method(
        "galore",
        "GaLore, gradients averaged at every step: basis by SVD of the gradient every 200 steps, moments kept",
        averages_gradients=True,
        basis_from="gradient",
        settings=(*_ADAM, *_LOWRANK, "basis_every", "scale"),
        defaults={"betas": (0.9, 0.999), "eps": 1e-6, "basis": "svd", "basis_every": 200, "scale": 0.25},
        fixed={"basis_offset": 1, "rotate_moments": False},
    ),
    Method(
        "local-adamw",
        "AdamW, parameters and moments averaged every K steps",
        averages=_EVERYTHING,
        settings=(*_ADAM, *_LOCAL_UPDATE, *_MOMENTS),
    ),
    Method(
        "desloc",
        "DES-LOC: AdamW, parameters averaged every K, first moment every 3 K, second every 6 K steps",
        averages=_EVERYTHING,
        settings=(*_ADAM, *_LOCAL_UPDATE, *_MOMENTS),
        moment_periods=(3, 6),
    ),
    Method(
        "diloco",
        "DiLoCo: AdamW inside, Nesterov on the averaged pseudo-gradient every K steps",
        averages=("parameters",),
        settings=(*_ADAM, *_LOCAL_UPDATE),
        defaults={"outer": "nesterov"},
    ),
)

METHODS: dict[str, Method] = {row.name: row for row in _ROWS}


def find(name: str) -> Method:
    """The row of that name.

    Raises:
        ValueError: no such method, with the nearest name.
    """
    if name not in METHODS:
        raise ValueError(unknown("method", name, METHODS))
    return METHODS[name]
