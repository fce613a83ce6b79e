"""What tests of the engine replace, by the names that they call it: one place to follow where the engine's names go."""

# ruff: noqa: F401
from vllm_vidspec.engine import tree_attention
from vllm_vidspec.engine.draft import drafter, score_blocks
from vllm_vidspec.engine.draft.drafter import Drafter
from vllm_vidspec.engine.draft.kv import DraftKV
from vllm_vidspec.engine.draft.model import DraftModel
from vllm_vidspec.engine.draft.noise import CoupledSampler
from vllm_vidspec.engine.draft.prefill import DraftPrefill
from vllm_vidspec.engine.hooks import attention as attention_guidance
from vllm_vidspec.engine.hooks import state_store, visual_states
from vllm_vidspec.engine.hooks.attention import AttentionGuidance
from vllm_vidspec.engine.hooks.hidden_states import HiddenStateGuidance
from vllm_vidspec.engine.hooks.prompts import PendingScores
from vllm_vidspec.engine.hooks.trees import TargetTrees
from vllm_vidspec.engine.verify import rules
from vllm_vidspec.engine.verify.verifier import CoupledVerifier
