"""What is learned while serving: how many drafts pay, for whom, and which pruner serves best; numpy only."""

from vllm_vidspec.adapt.bandit import Arm, Bandit
from vllm_vidspec.adapt.control import REST, Controller, Decision, Option, class_label

__all__ = ["REST", "Arm", "Bandit", "Controller", "Decision", "Option", "class_label"]
