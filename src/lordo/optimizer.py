"""A method at work on one worker: the local step, and around it the rules of the method's row. And LoRDO, the drop-in optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor
from torch.optim.optimizer import required

from lordo.lowrank import BasisMethod
from lordo.methods import SYNC_DEFAULTS, Method, find
from lordo.optim import LowRankAdam, ParamGroups, is_lowrank
from lordo.optim.error import ErrorDtype
from lordo.optim.local import evaluate, without_autocast
from lordo.optim.options import LOCAL_DEFAULTS, MomentDtype, check_range, check_whole
from lordo.shards import cut_dim, local
from lordo.suggest import nearest, unknown
from lordo.sync import Comm, Solo, as_comm
from lordo.sync.agreement import check_agreement
from lordo.sync.dtensors import as_dtensor, inside_of, is_dtensor, named_of, own_part
from lordo.sync.exchange import Exchange
from lordo.sync.formats import WireFormat
from lordo.sync.fragments import assign_fragments
from lordo.sync.group import warn_if_not_alone
from lordo.sync.inside import Inside, own_rows
from lordo.sync.rules import AnchorDevice, AverageGradients, SyncReport
from lordo.sync.schedule import PERIODS, is_due, steps_to_next
from lordo.sync.shares import MAX_LEFT_OUT_IN_A_ROW, LeftOut, average_
from lordo.updates import FullrankDenominator, FullrankSignal, default_omega

_REQUIRED: Any = required  # torch's mark of a setting that has no default
# Settings that decide which rules there are.
_WIRE = ("sync_wire", "sync_wire_moments", "sync_wire_basis")
_WHOLE_OPTIMIZER = ("outer", "anchor_device", *_WIRE, "sync_split", "sync_overlap", "sync_fragments")
# Settings that decide what is kept or sent.
_LASTING = (*_WHOLE_OPTIMIZER, "rank", "error_feedback", "error_dtype", "moment_dtype", "basis_every", *PERIODS.values())
# What torch's learning-rate schedulers put into the groups.
_SCHEDULER_KEYS = ("initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum")


class DistributedOptimizer(LowRankAdam):
    """A method at work on one worker: local step, and around it the rules of the method's row.

    Args:
        params: parameters, (name, parameter) pairs, or groups of either.
        method: a row of METHODS, or its name.
        workers: None, a process group, a one-dimensional DeviceMesh, or what `lordo.simulate` hands out.
        settings: of the method, by name; each may also be given for a parameter group.

    Attributes:
        workers: the Comm, which counts bytes and seconds.
        report: what the last synchronisation did.
        local_step_hooks: called after each local step, before anything is sent: there a worker still has its own weights.

    Raises:
        ValueError, TypeError: a setting or parameter that cannot be used. At the first step also when workers disagree in
            parameter names, shapes, dtypes, settings or initial weights.
    """

    def __init__(self, params: Iterable[Any], method: str | Method, *, workers: Any = None, **settings: Any) -> None:
        """Check everything, allocate all state; nothing is sent before the first step."""
        self.method = find(method) if isinstance(method, str) else method
        self._attach(as_comm(workers))
        if isinstance(params, ParamGroups) and params.in_ddp and self.workers.size > 1:
            raise ValueError(
                "the model is wrapped in DistributedDataParallel, which averages gradients at every step: leave the wrapper "
                "out, and pass workers=… alone"
            )
        resolved = self.method.resolve(settings)
        self.before, self.after = self.method.rules(resolved)
        super().__init__(params, resolved)
        if workers is None:
            warn_if_not_alone(self.workers.inside.num_devices)

    def _attach(self, comm: Comm) -> None:
        self.workers = comm
        self.report = SyncReport(step=0)
        self.local_step_hooks: list[Callable[[], None]] = []
        self._copied_from = 1  # workers that the original had, if this is a copy
        self._agreed = False
        self._gradients_averaged = False
        self._averaged_at = 0  # the step after which the weights were last averaged outside the schedule
        self._fragments: dict[Tensor, int] = {}

    # -- parameters and their state ------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters. All workers must do so at the same step."""
        param_group = dict(param_group)  # the caller's dict stays as it is: it may serve for another optimizer
        _check_keys(param_group, self.method)
        super().add_param_group(param_group)
        self.param_groups[-1]["started"] = False
        for counter in ("left_out", "left_out_in_a_row"):
            self.param_groups[-1][counter] = self.param_groups[0].get(counter, 0)
        self._agreed = False
        self._fragments = {}

    def check_group(self, group: dict[str, Any]) -> None:
        """Check the settings of a group, those of the local step and those of the synchronisation."""
        if self.method.basis_from is None and group["rank"] is not None:
            raise ValueError(f"method '{self.method.name}' has no low-rank weights: leave rank out, or None")
        super().check_group(group)
        for name in PERIODS.values():
            if name == "sync_every" or group[name] is not None:
                check_whole(name, group[name])
        _check_wire(group)
        if group["outer"] not in ("none", "nesterov"):
            raise ValueError(f"outer must be 'none' or 'nesterov'; got {group['outer']!r}")
        if group["anchor_device"] not in ("same", "cpu"):
            raise ValueError(f"anchor_device must be 'same' (as the weight) or 'cpu'; got {group['anchor_device']!r}")
        check_range("outer_lr", group["outer_lr"], 0, float("inf"))
        check_range("outer_momentum", group["outer_momentum"], 0, 1, high_included=False)

    def new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """State of the local step, and what the rules keep."""
        state = super().new_state(p, group)
        for rule in (*self.before, *self.after):
            state.update(rule.new_state(local(p.detach()), state, self.resolved(group)))
        return state

    # -- several devices in one worker -----------------------------------------------------------------------------------

    def check_devices(self, group: dict[str, Any]) -> None:
        """Find out which devices make up this worker, and refuse what does not work with several.

        Raises:
            TypeError, ValueError: one sentence.
        """
        named = [each for g in self.param_groups for each in named_of(g)]
        self.workers.inside = inside_of(named, self.workers, self.workers.inside)
        if any(cut_dim(p) is not None and is_lowrank(p.shape, group["rank"]) for p in group["params"]):
            self.method.check_parts(group)

    def own_rows(self, p: Tensor, matrix: Tensor) -> Tensor:
        """The rows of an (m, …) matrix that go with this device's part of a weight."""
        return own_rows(matrix, p, self.workers.inside)

    def sum_inside(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over the devices of this worker."""
        self.workers.inside.total_([("inside", tensor) for tensor in tensors])

    def first_inside(self, note: str | None) -> str | None:
        """A note of one of the devices of this worker that has one: the same on all of them."""
        device = next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))
        return self.workers.inside.first(note, device=device)

    def own_part(self, p: Tensor, key: str, value: Tensor) -> Tensor:
        """This device's part of a loaded state."""
        return own_part(key, value, p, lowrank="basis" in self.state[p])

    def state_dict(self) -> dict[str, Any]:
        """As in torch; where a worker is several devices, tensors that they share are DTensors."""
        saved = super().state_dict()
        parameters = [p for group in self.param_groups for p in group["params"]]
        numbers = [i for group in saved["param_groups"] for i in group["params"]]
        for i, p in zip(numbers, parameters, strict=True):
            if is_dtensor(p) and i in saved["state"]:
                state = saved["state"][i]
                saved["state"][i] = {key: as_dtensor(key, value, p, lowrank="basis" in state) for key, value in state.items()}
        return saved

    def fragment_of(self, p: Tensor) -> int:
        """Number of the fragment with which a parameter is averaged."""
        if not self._fragments:
            members = self.named_members()
            sizes = [
                (p.numel(), tuple(p.shape), str(p.dtype), group["rank"] if is_lowrank(p.shape, group["rank"]) else 0)
                for _, p, group in members
            ]
            numbers = assign_fragments(sizes, self.defaults["sync_fragments"])
            self._fragments = {p: number for (_, p, _), number in zip(members, numbers, strict=True)}
        return self._fragments[p]

    def resolved(self, group: dict[str, Any]) -> dict[str, Any]:
        """Settings of a group with those filled in that follow from K."""
        every = group["sync_every"]
        omega = default_omega(every) if group["omega"] is None else group["omega"]
        return {**group, "omega": omega, "basis_every": group["basis_every"] or every}

    # -- the step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Local step, and whatever is due after it. Returns what the closure returns."""
        loss = evaluate(closure)
        with without_autocast(self):
            self._step()
        return loss

    def _step(self) -> None:
        number = self.steps_taken + 1
        self.check_gradients()
        self.start()
        for rule in self.before:
            if isinstance(rule, AverageGradients):
                if self._gradients_averaged:
                    continue
                self._unscale_gradients()
            rule(self, self.workers, number)
        self._gradients_averaged = False
        for group in self.param_groups:
            group["started"] = True
        self.local_step()
        for hook in self.local_step_hooks:
            hook()
        self.workers.attempt(self.synchronise)
        if self.report.step == self.steps_taken and self.report.averaged:
            self._count_left_out(self.report.left_out)
        self.raise_if_hopeless()

    @torch.no_grad()
    def synchronise(self) -> None:
        """What is due after the step that was just taken: `step` does it."""
        for rule in self.after:
            rule(self, self.workers, self.steps_taken)

    def _count_left_out(self, left_out: Sequence[LeftOut]) -> None:
        """Count whether this worker's share was left out of an average, and tell whose was.

        Raises:
            FloatingPointError: on all workers, if one was left out too often in a row.
        """
        mine = any(each.worker == self.workers.rank for each in left_out)
        for group in self.param_groups:
            group["left_out"] += mine
            group["left_out_in_a_row"] = group["left_out_in_a_row"] + 1 if mine else 0
        if not left_out:
            return
        who = "nobody, for all have such numbers: " if len(left_out) == self.workers.size else ""
        told = f"after step {self.steps_taken} an average leaves out {who}{', '.join(map(str, left_out))}"
        if any(each.in_a_row >= MAX_LEFT_OUT_IN_A_ROW for each in left_out):
            raise FloatingPointError(f"{told}, as {MAX_LEFT_OUT_IN_A_ROW - 1} before it: look at that machine, or lower the learning rate")
        if mine or self.workers.rank == 0:
            warnings.warn(told, RuntimeWarning, stacklevel=5)

    def _unscale_gradients(self) -> None:
        """Take a GradScaler's factor out of the gradients before they are averaged: it may differ between workers."""
        scale = getattr(self, "grad_scale", None)
        if scale is None:
            return
        for _, p, _ in self.named_members():
            if p.grad is not None:
                local(p.grad).div_(scale.to(p.grad.device))
        self.grad_scale = None

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Average the gradients now, for methods that do so at every step: call it before clipping. Others: nothing.

        `step` does it if it was not called.
        """
        self.start()
        for rule in self.before:
            if isinstance(rule, AverageGradients):
                rule(self, self.workers, self.steps_taken + 1)
        self._gradients_averaged = True

    @torch.no_grad()
    def change_settings(self, **settings: Any) -> None:
        """Change settings of all groups from the next step on: on every worker at the same step, and to the same values.

        Where betas change, the moments are rescaled so that their bias-corrected values û and v̂ stay: both would jump otherwise, since
        the correction 1 − βᵗ of the new β goes back to the first step.

        Args:
            settings: of the step and of the outer step, by name; not those that decide what is kept (rank, error_feedback, basis_from,
                outer) or when workers meet.

        Raises:
            ValueError, TypeError: a setting that the method does not have or that cannot change, or a value that cannot be used.
        """
        for name in settings:
            if name not in self.method.settings:
                raise ValueError(f"method '{self.method.name}': {unknown('setting', name, self.method.settings)}")
            if name in _LASTING:
                raise ValueError(f"{name} decides what is kept or sent, and cannot change while training goes on")
        for group in self.param_groups:
            self.check_group({**group, **settings})
        if (exchange := self._exchange) is not None and "betas" in settings:
            exchange.average_parameters(self, self.workers, [], self.steps_taken)  # what is on its way was sent under the old ones
        for group in self.param_groups:
            if "betas" in settings and self.steps_taken:
                self._rescale_moments(group, group["betas"], settings["betas"])
            group.update(settings)

    def _rescale_moments(self, group: dict[str, Any], old: tuple[float, float], new: tuple[float, float]) -> None:
        for key, before, after in zip(("exp_avg", "exp_avg_sq"), old, new, strict=True):
            for p in group["params"] if before != after else ():
                t = float(self.state[p]["step"]) if p in self.state else 0.0
                if t > 0:
                    self.state[p][key].mul_((1 - after**t) / (1 - before**t))

    @torch.no_grad()
    def average_parameters(self) -> None:
        """Average the weights over the workers now, outside the schedule: before the last evaluation, or before saving a model.

        Nothing is sent if they were averaged at this very step. Training may go on afterwards.
        """
        self._check_attached()
        stale = self.unaveraged_parameters()
        left_out: tuple[LeftOut, ...] = ()
        if (exchange := self._exchange) is not None:
            names = {name for name, _ in stale}
            members = [member for member in self.named_members() if member[0] in names]
            left_out = exchange.average_parameters(self, self.workers, members, self.steps_taken)
        elif stale:
            named = [("parameters", name, local(p.detach())) for name, p in stale]
            left_out = average_(named, self.workers, in_a_row=self.left_out_in_a_row)
        if stale:
            self._averaged_at = self.steps_taken
            self._count_left_out(left_out)

    @torch.no_grad()
    def average_state(self) -> None:
        """Average weights, moments, errors and counts of steps over the workers now: what any worker then holds is the state of all.

        For a checkpoint to be loaded with another number of workers. The errors' mean is what projection dropped of the mean gradients.

        Raises:
            ValueError: each worker has bases of its own, so that moments have no mean.
        """
        if self.method.averages_gradients:
            return
        if self.method.basis_from not in (None, "sync"):
            raise ValueError(f"with method '{self.method.name}' each worker has bases of its own: save the state of every worker instead")
        self.average_parameters()
        named: list[tuple[str, str, Tensor]] = []
        errors: list[tuple[Tensor, Tensor]] = []
        for name, p, _ in self.named_members():
            state = self.state[p]
            named += [(key, f"{name}.{key}", state[key]) for key in ("exp_avg", "exp_avg_sq", "residual", "step") if key in state]
            if "error" in state:
                errors.append((p, self.take_error(p)))
                named.append(("error", f"{name}.error", errors[-1][1]))
        self._count_left_out(average_(named, self.workers, in_a_row=self.left_out_in_a_row))
        for p, error in errors:
            self.give_error(p, error)

    @property
    def _exchange(self) -> Exchange | None:
        """The rule that has averages on their way, if there is one."""
        return next((rule for rule in self.after if isinstance(rule, Exchange)), None)

    def unaveraged_parameters(self) -> list[tuple[str, Tensor]]:
        """(name, parameter) of those that may differ between workers at this step, sorted by name."""
        if self.method.averages_gradients or self.workers.size == 1 or self._averaged_at == self.steps_taken:
            return []
        now = self.steps_taken
        overlapped = self.defaults["sync_overlap"] > 0  # what is taken in is already some steps old
        return [
            (name, p) for name, p, group in self.named_members() if overlapped or not is_due(group, "parameters", now, self.fragment_of(p))
        ]

    @property
    def num_left_out(self) -> int:
        """Averages that left this worker's share out because it was not finite."""
        return int(self.param_groups[0]["left_out"])

    @property
    def left_out_in_a_row(self) -> int:
        """How many averages before now left this worker's share out without a break."""
        return int(self.param_groups[0]["left_out_in_a_row"])

    @property
    def max_skipped_in_a_row(self) -> int:
        """Steps skipped in a row that are an error; a round more where a synchronisation may give this worker sound weights again."""
        alone = self.workers.size == 1 or self.method.averages_gradients
        return super().max_skipped_in_a_row + (0 if alone else self.round_steps)

    @property
    def round_steps(self) -> int:
        """K, steps between two averages of the parameters; 1 where gradients are averaged at every step."""
        return 1 if self.method.averages_gradients else int(self.param_groups[0]["sync_every"])

    @property
    def steps_to_next_sync(self) -> int:
        """Steps until parameters are averaged again, 1 to K."""
        return 1 if self.method.averages_gradients else steps_to_next(self.param_groups[0], self.steps_taken)

    @torch.no_grad()
    def start(self) -> None:
        """Compare notes with the other workers, and lay the anchors down; `step` does it if it was not called.

        Happens once before the first step, and again after loading a state or adding parameters.

        Raises:
            ValueError: workers differ in parameter names, shapes, dtypes, settings or initial weights.
        """
        self._check_attached()
        if self._agreed:
            return
        new = [p for group in self.param_groups if not group["started"] for p in group["params"] if p in self.state]
        for p in new:
            if "anchor" in self.state[p]:
                self.state[p]["anchor"].copy_(local(p.detach()))  # the weights may have been loaded after the optimizer was built
        members = self.named_members()
        settings = [{"method": self.method.name, **_plain(g)} for g in self.param_groups]
        check_agreement(members, settings, self.workers, weights=[m for m in members if not m[2]["started"]])
        self._agreed = True

    def skip_agreement(self) -> None:
        """Do not compare notes before the next step: of a state that was taken over from another worker, the others know nothing."""
        self._agreed = True

    def _check_attached(self) -> None:
        if self._copied_from > 1:
            raise RuntimeError(
                f"this optimizer is a copy of one that had {self._copied_from} workers, and a copy has none: build it anew with "
                "workers=… and load the state_dict"
            )

    # -- copying, saving, loading --------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the connection to the other workers."""
        return {**super().__getstate__(), "method": self.method, "_copied_from": max(self._copied_from, self.workers.size)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is alone; it refuses to step if the original was not."""
        super().__setstate__(state)
        if "method" not in state:  # torch calls this from load_state_dict too, with state and groups alone
            return
        copied_from = self._copied_from
        self._attach(Solo())
        self._copied_from = copied_from
        self.workers.inside = inside_of([each for group in self.param_groups for each in named_of(group)], self.workers, Inside())
        self.before, self.after = self.method.rules(self.defaults)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; workers compare notes again before the next step, and what was on its way is sent again."""
        _check_same_rules(self.defaults, state_dict["param_groups"])
        super().load_state_dict(state_dict)
        self.before, self.after = self.method.rules(self.defaults)
        self._agreed = self._gradients_averaged = False
        self._averaged_at = 0
        self.report = SyncReport(step=0)


def _plain(group: dict[str, Any]) -> dict[str, Any]:
    """What must be equal on all workers in a group: its settings, as plain values, and the steps taken."""
    hidden = ("params", "param_names", "skipped_steps", "skipped_in_a_row", "left_out", "left_out_in_a_row")
    plain = {key: value for key, value in group.items() if key not in hidden}
    return {key: float(value) if isinstance(value, Tensor) else value for key, value in plain.items()}


def _check_wire(group: Mapping[str, Any]) -> None:
    """Check how averages travel.

    Raises:
        ValueError, TypeError: naming the setting, what was given and what is allowed.
    """
    for name in _WIRE:
        if group[name] not in get_args(WireFormat) and (name == "sync_wire" or group[name] is not None):
            raise ValueError(f"{name} must be one of {', '.join(map(repr, get_args(WireFormat)))}; got {group[name]!r}")
    if not isinstance(group["sync_split"], bool):
        raise TypeError(f"sync_split must be True or False; got {group['sync_split']!r}")
    check_whole("sync_fragments", group["sync_fragments"])
    overlap = group["sync_overlap"]
    if overlap != 0 or isinstance(overlap, bool):
        check_whole("sync_overlap", overlap, hint=", or 0 to wait for every average")
    periods = [(group[name], name != "sync_every", name) for name in PERIODS.values() if group[name] is not None]
    shortest, _, name = min(periods)
    what = f"the shortest period, {name}={shortest}"
    if overlap >= shortest:
        raise ValueError(f"sync_overlap must be below {what}, so that an average arrives before the next one; got {overlap}")
    if group["sync_fragments"] > shortest:
        raise ValueError(f"sync_fragments must be at most {what}, so that each has a step of its own; got {group['sync_fragments']}")


def _check_same_rules(own: Mapping[str, Any], saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse a state that was kept under other rules: it may fit and still mean something else."""
    for group in saved:
        for name in _WHOLE_OPTIMIZER:
            if name in group and group[name] != own[name]:
                raise ValueError(
                    f"the loaded state was saved with {name}={group[name]!r}, where this optimizer has {own[name]!r}: build it with the "
                    "settings of the saved one"
                )


def _check_keys(param_group: Mapping[str, Any], method: Method) -> None:
    """Refuse what a group may not set; torch itself keeps any key without a word.

    Raises:
        ValueError: a setting that this method does not have, or a key that looks like a misspelt one.
    """
    known = {*method.settings, "params", "param_names", "rank", *_SCHEDULER_KEYS}
    for key in param_group:
        foreign = key in LOCAL_DEFAULTS or key in SYNC_DEFAULTS or nearest(key, method.settings)
        if key not in known and foreign:
            raise ValueError(f"parameter group: {unknown('setting', key, method.settings)}")
        if key in _WHOLE_OPTIMIZER:
            raise ValueError(f"parameter group: {key} holds for all groups: give it to the optimizer")


class LoRDO(DistributedOptimizer):
    """Low-rank Adam on each worker, one basis for all from the averaged pseudo-gradient, communication every K steps.

    Jovanović et al., "LoRDO: Distributed Low-Rank Optimization with Infrequent Communication", ICML 2026, arXiv 2602.04396. For a
    weight W (m, n), m <= n, with gradient G, error E and basis Q (m, r):

        X = G + E,  g = QᵀX,  E = X − Q g,  u, v = moments of g
        W = (1 − lr·wd) W − lr [ (1−ω) X / μ(√v̂ + ε) + ω Q (û / (√v̂ + ε)) ]

    and every K steps: average W, u, v over the workers; Δ = W − anchor; Q = leading r left singular vectors of Δ; u, v rotated.

    Args:
        params: `lordo.param_groups(model, rank=…)` (recommended: it keeps embeddings and heads full-rank), parameters, or
            (name, parameter) pairs. Without module types every matrix whose smaller side exceeds the rank is low-rank.
        lr: learning rate.
        rank: r. None: every weight is full-rank, and with omega=1 the step is AdamW's. May differ per group.
        sync_every: K, steps between two averages of the parameters.
        sync_exp_avg_every, sync_exp_avg_sq_every: the same for the moments; None follows sync_every.
        sync_error_every: the same for the error; None never averages it.
        sync_wire: how parameters (and error) travel: "float32" (float64 for float64 weights), "bfloat16", "int8", "int4".
        sync_wire_moments, sync_wire_basis: the same for the moments, and for the basis and the gradient of the first one. None: moments
            follow sync_wire, and the basis is bfloat16 unless sync_wire is float32.
        sync_split: send what changed inside the basis as r×n numbers in full precision, and only the rest in the wire format.
        sync_overlap: τ, steps of training while an average is on its way; 0 waits for it.
        sync_fragments: P, groups into which the parameters are divided; each is averaged every K steps, K/P steps after the one before.
        betas: decay of the two moments. eps: added to the denominator. weight_decay: decoupled, as in AdamW.
        omega: ω, the share of the low-rank momentum; None is max(0.9, 1 − 1/K); 1 switches the full-rank term off.
        error_feedback: keep what projection drops and add it to the next gradient (memory: one tensor of the weight's shape).
        error_dtype: "float32" (float64 for float64 weights), "bfloat16", "int8" or "int6" (with a scale for each column), all but the
            first rounded at random. moment_dtype: "float32" or "bfloat16", the same for both moments.
        anchor_device: where the weights of the last synchronisation are kept, "same" as they or "cpu" (pinned if they are on a GPU).
        fullrank_signal: F of the full-rank term, "gradient+error" (X) or "gradient" (G, the formula as printed in the paper).
        fullrank_denominator: μ, "channel" (one mean for each column) or "mean" (one for the matrix, as in the paper).
        basis: "svd", "subspace" (a few matrix products), or "auto" (svd up to a smaller side of 128).
        workers: None (alone), a process group, a one-dimensional DeviceMesh, or what `lordo.simulate` hands out.

    Raises:
        ValueError, TypeError: see DistributedOptimizer.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        *,
        rank: int | None = _REQUIRED,
        sync_every: int = 32,
        sync_exp_avg_every: int | None = None,
        sync_exp_avg_sq_every: int | None = None,
        sync_error_every: int | None = None,
        sync_wire: WireFormat = "float32",
        sync_wire_moments: WireFormat | None = None,
        sync_wire_basis: WireFormat | None = None,
        sync_split: bool = False,
        sync_overlap: int = 0,
        sync_fragments: int = 1,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        omega: float | None = None,
        error_feedback: bool = True,
        error_dtype: ErrorDtype = "float32",
        moment_dtype: MomentDtype = "float32",
        anchor_device: AnchorDevice = "same",
        fullrank_signal: FullrankSignal = "gradient+error",
        fullrank_denominator: FullrankDenominator = "channel",
        basis: BasisMethod = "auto",
        workers: Any = None,
    ) -> None:
        """See the class."""
        super().__init__(
            params,
            "lordo",
            workers=workers,
            lr=lr,
            rank=rank,
            sync_every=sync_every,
            sync_exp_avg_every=sync_exp_avg_every,
            sync_exp_avg_sq_every=sync_exp_avg_sq_every,
            sync_error_every=sync_error_every,
            sync_wire=sync_wire,
            sync_wire_moments=sync_wire_moments,
            sync_wire_basis=sync_wire_basis,
            sync_split=sync_split,
            sync_overlap=sync_overlap,
            sync_fragments=sync_fragments,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            omega=omega,
            error_feedback=error_feedback,
            error_dtype=error_dtype,
            moment_dtype=moment_dtype,
            anchor_device=anchor_device,
            fullrank_signal=fullrank_signal,
            fullrank_denominator=fullrank_denominator,
            basis=basis,
        )
