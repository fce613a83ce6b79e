"""What is learned while serving: how many drafts pay at a batch size, and which pruner serves best; plain Python."""

from vllm_vidspec.adapt.bandit import Arm, Bandit
from vllm_vidspec.adapt.payoff import Payoff

__all__ = ["Arm", "Bandit", "Payoff"]
