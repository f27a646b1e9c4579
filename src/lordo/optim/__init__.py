"""The local step: one optimizer for all parameters of a worker. It knows no network."""

from lordo.optim.local import LowRankAdam
from lordo.optim.routing import ParamGroups, is_lowrank, param_groups

__all__ = ["LowRankAdam", "ParamGroups", "is_lowrank", "param_groups"]
