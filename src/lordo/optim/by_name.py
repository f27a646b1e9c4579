"""A saved state brought into the order of the optimizer that loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lordo.optim.routing import clean_names


def by_name(state_dict: dict[str, Any], param_groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same state with groups and parameters in the order of `param_groups`, matched by name.

    Args:
        state_dict: of `state_dict()`. param_groups: of the optimizer that loads it. Both as they are where either lacks names.

    Raises:
        ValueError: other names; or a group here whose parameters come from several groups there, whose settings may differ.
    """
    saved_groups = state_dict["param_groups"]
    if not all("param_names" in group for group in (*saved_groups, *param_groups)):
        return state_dict
    saved_names, own_names = _names(saved_groups), _names(param_groups)
    saved_ids: dict[str, Any] = {}
    for names, group in zip(saved_names, saved_groups, strict=True):
        saved_ids.update(zip(names, group["params"], strict=True))
    home = {name: number for number, names in enumerate(saved_names) for name in names}
    for name in sorted(home.keys() ^ {name for names in own_names for name in names}):
        where = "the loaded state but not in this optimizer" if name in home else "this optimizer but not in the loaded state"
        raise ValueError(f"parameter '{name}' is in {where}: build it for the model that was saved")
    groups = []
    for number, (names, own) in enumerate(zip(own_names, param_groups, strict=True)):
        homes = sorted({home[name] for name in names})
        if len(homes) > 1:
            raise ValueError(f"parameter group {number} holds parameters of the groups {homes} of the loaded state: group them as there")
        settings = saved_groups[homes[0]] if homes else own
        groups.append({**settings, "params": [saved_ids[name] for name in names], "param_names": list(own["param_names"])})
    return {**state_dict, "param_groups": groups}


def _names(groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Names of each group's parameters, without wrappers' prefixes."""
    flat = iter(clean_names([name for group in groups for name in group["param_names"]]))
    return [[next(flat) for _ in group["param_names"]] for group in groups]
