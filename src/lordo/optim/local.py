"""LowRankAdam: Adam whose moments live in a subspace, with error feedback and a quasi-hyperbolic full-rank term."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import required

from lordo.finite import first_nonfinite
from lordo.lowrank import canonical_shape, change_basis, identity_basis
from lordo.optim.by_name import by_name
from lordo.optim.error import canonical_state, error_of, give_error_, is_rounded, new_error, settle_, take_error_
from lordo.optim.fullrank_step import fullrank_step_
from lordo.optim.local_basis import local_basis
from lordo.optim.options import LOCAL_DEFAULTS, check_options, keeps_sums, moment_dtype
from lordo.optim.routing import clean_names, is_lowrank
from lordo.optim.shared_steps import batches, shared_steps_
from lordo.optim.stacks import Part, lowrank_steps_
from lordo.shards import canonical_part, cut_dim, cut_side, is_tall, layout_of, local

# Steps in a row that may be skipped for a non-finite gradient before it is an error.
MAX_SKIPPED_IN_A_ROW = 20
# Steps after which an error kept as sums (`error.py`) is formed even without a new basis: what rounding does to the sums grows with them.
SETTLE_EVERY = 256


class LowRankAdam(torch.optim.Optimizer):
    """The local step of every method in lordo, for all parameters of one worker.

    State of a low-rank weight of canonical shape (m, n), m <= n: `step` (), `exp_avg` and `exp_avg_sq` (r, n), `basis` (m, r), and
    with error feedback `error` in the weight's own shape and what goes with its form (`error_of` gives E whatever the form). Of any
    other weight: `step`, `exp_avg`, `exp_avg_sq` in its shape. All of it exists from construction on, in float32 (float64 for float64
    weights) unless a setting says otherwise, under the same keys on every worker. Of a weight that is shared among devices (a DTensor)
    each holds the parts that go with its rows or columns (docs/decisions/0020).

    Args:
        params: parameters, (name, parameter) pairs, or groups of either (`lordo.param_groups`).
        options: the settings of LOCAL_DEFAULTS, each overridable in a group.

    Raises:
        ValueError, TypeError: a setting or parameter that cannot be used.
    """

    _step_supports_amp_scaling = True  # a GradScaler must not skip `step` on one worker alone

    def __init__(self, params: Iterable[Any], options: dict[str, Any]) -> None:
        """Check the settings and allocate the state of every parameter."""
        super().__init__(params, {**LOCAL_DEFAULTS, **options})

    # -- parameters and their state ------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in torch; their state is allocated at once."""
        if "rank" not in param_group and self.defaults["rank"] is required:
            raise ValueError("rank is missing: give rank=…, or use lordo.param_groups(model, rank=…)")
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self.check_group(group)
            for p in group["params"]:
                _check_parameter(p)
            self.check_devices(group)
        except (ValueError, TypeError):
            self.param_groups.pop()  # a refused group leaves the optimizer as it was
            raise
        for counter in ("steps_taken", "skipped_steps", "skipped_in_a_row"):
            group[counter] = self.param_groups[0][counter] if len(self.param_groups) > 1 else 0
        for p in group["params"]:
            if p.requires_grad:
                self.state[p] = self.new_state(p, group)

    def check_group(self, group: dict[str, Any]) -> None:
        """Check the settings of a group."""
        check_options(group)

    def new_state(self, p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """State of one parameter before its first step."""
        dtype, rank, part = torch.promote_types(p.dtype, torch.float32), group["rank"], local(p.detach())
        shape: torch.Size | tuple[int, int] = part.shape
        state = {"step": torch.zeros((), dtype=torch.float32)}
        if is_lowrank(p.shape, rank):
            shape = (rank, canonical_part(p.detach(), p).shape[1])
            basis = identity_basis(canonical_shape(p.shape)[0], rank, dtype=dtype, device=p.device)
            state["basis"] = self.own_rows(p, basis) if cut_side(p) == "rows" else basis
            if group["error_feedback"]:
                state |= new_error(part, tall=is_tall(p), rank=rank, error_dtype=group["error_dtype"], apart=keeps_sums(group))
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment] = torch.zeros(shape, dtype=moment_dtype(group, p.dtype), device=p.device)
        return state

    def named_members(self) -> list[tuple[str, Tensor, dict[str, Any]]]:
        """(name, parameter, group) of every trainable parameter, sorted by name: the same order on every worker."""
        return sorted(self._members(), key=lambda member: member[0])

    def _members(self) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
        raw = [name for group in self.param_groups for name in group.get("param_names", ())]
        names = iter(clean_names(raw) if raw else (f"parameter {i:06d}" for i in count()))
        for group in self.param_groups:
            for p, name in zip(group["params"], names, strict=False):
                if p in self.state:
                    yield name, p, group

    def set_basis(self, p: Tensor, basis: Tensor) -> Tensor:
        """Install a basis (m, r), carrying both moments into it; returns C = Q_newᵀ Q_old, (r, r)."""
        state = self.canonical_state(p)
        settle_(state)  # the error is held in terms of the old basis
        old = state["basis"]
        change = basis.mT @ old
        if cut_side(p) == "rows":
            self.sum_inside([change])
        betas, step = self._group_of(p)["betas"], float(state["step"])
        u, v = (state[moment].to(old.dtype) for moment in ("exp_avg", "exp_avg_sq"))
        u, v = change_basis(u, v, change, betas=betas, step=step)
        state["exp_avg"].copy_(u)
        state["exp_avg_sq"].copy_(v)
        old.copy_(basis)
        return change

    def canonical_state(self, p: Tensor) -> dict[str, Tensor]:
        """The state of a parameter with its error in canonical orientation."""
        return canonical_state(self.state[p], tall=p.ndim == 2 and is_tall(p))

    def error_of(self, p: Tensor) -> Tensor:
        """E of a low-rank weight, in its own shape: what projection dropped so far. A copy; `state[p]["error"]` may hold another form.

        Of a weight that is shared among devices: this device's part of it.
        """
        return self._in_own_shape(error_of(self.canonical_state(p), canonical_part(p.detach(), p)), p)

    def take_error(self, p: Tensor) -> Tensor:
        """E of a low-rank weight, to be changed in place and given back."""
        return self._in_own_shape(take_error_(self.canonical_state(p), canonical_part(p.detach(), p)), p)

    def give_error(self, p: Tensor, error: Tensor) -> None:
        """Write an E that came from `take_error`."""
        give_error_(self.canonical_state(p), self._in_own_shape(error, p))

    def _in_own_shape(self, matrix: Tensor, p: Tensor) -> Tensor:
        """From the canonical orientation to the weight's own, or back."""
        return matrix.mT if is_tall(p) else matrix

    # -- several devices in one worker: here there is one ----------------------------------------------------------------

    def check_devices(self, group: dict[str, Any]) -> None:
        """Check how the parameters of a group are spread over devices."""

    def own_rows(self, p: Tensor, matrix: Tensor) -> Tensor:
        """The rows of an (m, …) matrix that go with this device's part of a weight."""
        return matrix

    def sum_inside(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over the devices of this worker."""

    def first_inside(self, note: str | None) -> str | None:
        """A note of one of the devices of this worker that has one: the same on all of them."""
        return note

    def resolved(self, group: dict[str, Any]) -> dict[str, Any]:
        """The settings of a group with those that follow from others filled in."""
        return group

    def _group_of(self, p: Tensor) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(p is q for q in group["params"]))

    # -- the step ------------------------------------------------------------------------------------------------------

    @property
    def steps_taken(self) -> int:
        """Calls of `step` so far, skipped ones included: what every schedule counts."""
        return int(self.param_groups[0]["steps_taken"])

    @property
    def num_skipped_steps(self) -> int:
        """Steps this worker skipped because a gradient was not finite."""
        return int(self.param_groups[0]["skipped_steps"])

    @property
    def max_skipped_in_a_row(self) -> int:
        """Steps skipped in a row that are an error."""
        return MAX_SKIPPED_IN_A_ROW

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One local step; returns what the closure returns."""
        loss = evaluate(closure)
        with without_autocast(self):
            self.check_gradients()
            self.local_step()
            self.raise_if_hopeless()
        return loss

    def local_step(self) -> None:
        """Update every weight that has a gradient, or none of them if a gradient is not finite."""
        unusable = self._nonfinite_gradient()
        self._count(unusable)
        if unusable is not None:
            return
        for group in self.param_groups:
            options = self.resolved(group)
            lowrank: list[Part] = []
            shared: list[tuple[Tensor, Tensor]] = []
            fullrank: list[Part] = []
            for p in group["params"]:
                if p.grad is None or p not in self.state:
                    continue
                weight, gradient, state = local(p.detach()), self._unscaled(local(p.grad)), self.state[p]
                if "basis" not in state:
                    state["step"] += 1
                    fullrank.append((weight, gradient, state))
                elif cut_dim(p) is None:
                    lowrank.append(self._lowrank_part(p, gradient, options))
                else:
                    shared.append((p, gradient))
            lowrank_steps_(lowrank, options)
            self._shared_steps(shared, options)
            fullrank_step_(fullrank, options)

    def _lowrank_part(self, p: Tensor, gradient: Tensor, options: dict[str, Any]) -> Part:
        """What a step needs of a weight, in canonical orientation, the gradient taken in."""
        weight, gradient, state = canonical_part(p.detach(), p), self._in_own_shape(gradient, p), self.canonical_state(p)
        _take_in_(gradient, state, options)
        state["step"] += 1
        return weight, gradient, state

    def _shared_steps(self, shared: list[tuple[Tensor, Tensor]], options: dict[str, Any]) -> None:
        for side in ("rows", "columns"):
            weights = [p for p, _ in shared if cut_side(p) == side]
            gradients = [gradient for p, gradient in shared if cut_side(p) == side]
            for batch in batches(weights, rank=options["rank"]):
                parts = [self._lowrank_part(p, G, options) for p, G in zip(weights[batch], gradients[batch], strict=True)]
                shared_steps_(parts, options, side=side, sum_=self.sum_inside)

    def check_gradients(self) -> None:
        """Refuse gradients that this step cannot use, before anything is sent.

        Raises:
            ValueError, TypeError: a gradient of a parameter that was frozen at first; a sparse one, or one laid out in another way.
        """
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None and p not in self.state):
            flat = " (ZeRO puts flattened parameters in its place: use fully_shard instead)" if p.ndim == 1 else ""
            shape = tuple(p.shape)
            raise ValueError(
                f"a parameter of shape {shape} was not there or frozen when the optimizer was built: add it by add_param_group{flat}"
            )
        for name, p, _ in self._members():
            if p.grad is not None and layout_of(p.grad) != layout_of(p):
                raise TypeError(
                    f"the gradient of '{name}' is laid out over devices as {layout_of(p.grad)}, the parameter as {layout_of(p)}: "
                    "LoRDO needs them alike, as fully_shard leaves them"
                )
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise TypeError(f"the gradient of '{name}' is {p.grad.layout}; LoRDO needs dense gradients (sparse=False)")

    def _nonfinite_gradient(self) -> str | None:
        """Name of a parameter whose gradient holds a NaN or an infinity, on any device of this worker."""
        return self.first_inside(first_nonfinite((name, local(p.grad)) for name, p, _ in self._members() if p.grad is not None))

    def _count(self, unusable: str | None) -> None:
        """Count this step in every group, and report it if it is skipped."""
        for group in self.param_groups:
            group["steps_taken"] += 1
            group["skipped_steps"] += unusable is not None
            group["skipped_in_a_row"] = group["skipped_in_a_row"] + 1 if unusable is not None else 0
        if unusable is None:
            return
        self._skipped = f"step {self.steps_taken} skipped on this worker: the gradient of '{unusable}' is not finite"
        if self.param_groups[0]["skipped_in_a_row"] < self.max_skipped_in_a_row:
            warnings.warn(f"{self._skipped} ({self.num_skipped_steps} skipped so far)", RuntimeWarning, stacklevel=4)

    def raise_if_hopeless(self) -> None:
        """An error when too many steps in a row were skipped; at the end of a step, so that the other workers are not left waiting in it.

        Raises:
            FloatingPointError: naming the last step and parameter.
        """
        in_a_row = self.param_groups[0]["skipped_in_a_row"]
        if in_a_row >= self.max_skipped_in_a_row:
            raise FloatingPointError(
                f"{self._skipped}, and so were the {in_a_row - 1} before it: lower the learning rate or check the data"
            )

    def _unscaled(self, gradient: Tensor) -> Tensor:
        """The gradient without a GradScaler's factor (a copy then: `p.grad` is never written)."""
        scale = getattr(self, "grad_scale", None)
        return gradient if scale is None else gradient / scale.to(gradient.device)

    # -- saving and loading --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, keeping its dtypes (torch would cast moments to the dtype of the weights).

        Parameters that have names here and there are matched by them, whatever the order of parameters and groups.

        Raises:
            ValueError: the state of another model, of other groups or of an optimizer with other settings.
        """
        state_dict = by_name(state_dict, self.param_groups)
        self._check_state(state_dict)
        loaded: dict[str, Any] = {}
        handle = self.register_load_state_dict_pre_hook(lambda _, final: loaded.update(final))  # after the user's hooks
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        saved_ids = [i for group in loaded["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for saved_id, p in zip(saved_ids, parameters, strict=True):
            for key, value in loaded["state"].get(saved_id, {}).items():
                own = self.state[p][key]
                self.state[p][key] = self.own_part(p, key, value).detach().clone().to(device=own.device)

    def own_part(self, p: Tensor, key: str, value: Tensor) -> Tensor:
        """This device's part of a loaded state."""
        return value

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        """Refuse the state of another optimizer or another model: it would train on in silence, without its bases."""
        saved_ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for saved_id, p in zip(saved_ids, parameters, strict=False):  # torch itself compares their numbers
            own, saved = self.state.get(p, {}), state_dict["state"].get(saved_id, {})
            if own.keys() != saved.keys():
                raise ValueError(
                    f"the loaded state of a parameter of shape {tuple(p.shape)} has {', '.join(sorted(saved)) or 'nothing'}, where this "
                    f"optimizer has {', '.join(sorted(own)) or 'nothing'}: build it with the settings of the saved one"
                )
            for key, value in own.items():
                theirs = self.own_part(p, key, saved[key]).shape
                if value.shape != theirs:
                    raise ValueError(f"'{key}' has shape {tuple(theirs)} in the loaded state, {tuple(value.shape)} here")


def _take_in_(gradient: Tensor, state: dict[str, Tensor], options: dict[str, Any]) -> None:
    """X = G + E in the memory of an error that is not rounded; then a new basis, if this worker computes its own now."""
    signal = gradient
    if "error" in state and not is_rounded(state):
        signal = state["error"].add_(gradient)
    local_basis(signal, state, options)
    if (int(state["step"]) + 1) % SETTLE_EVERY == 0:
        settle_(state)


@contextmanager
def without_autocast(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Switch autocast off on the devices of the parameters: moments and bases are float32 wherever `step` is called."""
    devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
    with ExitStack() as stack:
        for device in devices - {"meta"}:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def evaluate(closure: Callable[[], Any] | None) -> Any:
    """Loss and gradients from a closure, if there is one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _check_parameter(p: Tensor) -> None:
    if p.layout is not torch.strided:
        raise TypeError(f"LoRDO optimizes dense parameters; got a parameter of {p.layout}, shape {tuple(p.shape)}")
    if not p.is_floating_point() or p.element_size() < 2:
        raise TypeError(f"LoRDO optimizes real floating-point parameters; got a parameter of {p.dtype}, shape {tuple(p.shape)}")
