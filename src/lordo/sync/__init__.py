"""What workers exchange, when, and over what. It knows parameters and their state, not the mathematics of a step."""

from lordo.sync.agreement import DisagreementError
from lordo.sync.comm import Comm, Solo, WorkerError
from lordo.sync.group import Group, as_comm
from lordo.sync.threads import simulate

__all__ = ["Comm", "DisagreementError", "Group", "Solo", "WorkerError", "as_comm", "simulate"]
