"""lordo: train language models on machines joined by slow links, with low-rank optimizer states and rare communication."""

from lordo.methods import METHODS
from lordo.optim import param_groups
from lordo.optimizer import DistributedOptimizer, LoRDO
from lordo.sync import Comm, simulate

__version__ = "0.1.0"

__all__ = ["METHODS", "Comm", "DistributedOptimizer", "LoRDO", "__version__", "param_groups", "simulate"]
