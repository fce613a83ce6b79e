"""What is learned while serving: how many drafts pay, for whom, and which pruner serves best; numpy only."""

from vllm_vidspec.adapt.bandit import Arm, Bandit
from vllm_vidspec.adapt.classes import class_label
from vllm_vidspec.adapt.control import Controller
from vllm_vidspec.adapt.options import REST, Decision, Option, StepKind

__all__ = ["REST", "Arm", "Bandit", "Controller", "Decision", "Option", "StepKind", "class_label"]
