"""What a draft step reads beside its target's, and what is said where quantising the draft would help; plain Python."""

from collections.abc import Mapping
from typing import Any, NamedTuple

DEAR = 1 / 3  # a draft step that reads more than this of the target's bytes is worth a word
USUAL_FORWARDS = 5  # of a draft step, where nobody has said
FP8 = "fp8_per_tensor"
WEIGHT_BYTES = 2  # of a weight that is not quantised, as those of the output head


def part(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a model's config.json, of an Omni model its thinker's; nothing where it has none."""
    return (config.get("thinker_config") or config).get(name) or {}


class Decoder(NamedTuple):
    """Sizes of a decoder, as its config.json has them."""

    layers: int
    hidden: int  # size of the residual stream
    heads: int  # query heads of a layer
    kv_heads: int  # KV heads of a layer
    head_dim: int
    intermediate: int  # inner size of an MLP, or of one expert
    vocab: int  # rows of the embedding and of the output head
    experts: int = 0  # of a layer; 0: dense
    active_experts: int = 0  # that a token goes through

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Decoder":
        """Return those of a Hugging Face configuration, as JSON has it; a KeyError names what it lacks."""
        text = part(config, "text_config") or config
        hidden, heads = text["hidden_size"], text["num_attention_heads"]
        names = ("num_experts", "num_local_experts", "n_routed_experts")  # Qwen's, transformers' for it, GLM's
        routed = next((text[name] for name in names if text.get(name)), 0)
        shared = text.get("n_shared_experts") or 0 if routed else 0
        return cls(
            layers=text["num_hidden_layers"],
            hidden=hidden,
            heads=heads,
            kv_heads=text["num_key_value_heads"],
            head_dim=text.get("head_dim") or hidden // heads,
            intermediate=text["moe_intermediate_size" if routed else "intermediate_size"],
            vocab=text["vocab_size"],
            experts=routed + shared,
            active_experts=text["num_experts_per_tok"] + shared if routed else 0,
        )

    @property
    def head_params(self) -> int:
        """Weights of the output head."""
        return self.vocab * self.hidden

    def layer_params(self, experts: float) -> float:
        """Return the weights of all layers, with so many experts in a layer and its router; biases, norms left out."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        mlp: float = 3 * self.hidden * self.intermediate
        if self.experts:
            mlp = experts * mlp + self.experts * self.hidden
        return self.layers * (attention + mlp)


class Weights(NamedTuple):
    """The weights that a step of one request reads; biases and norms are left out."""

    layers: float  # Of the decoder's layers, of experts those that a token goes through
    head: float  # Of the output head
    layer_bytes: float = WEIGHT_BYTES  # Of a weight of the layers

    @property
    def read_bytes(self) -> float:
        """Bytes of all of them."""
        return self.layers * self.layer_bytes + self.head * WEIGHT_BYTES


def draft_share(target: Weights, draft: Weights, num_forwards: int) -> float:
    """Return the bytes of weights that a draft step of one request reads, of those that a step of its target reads."""
    return num_forwards * draft.read_bytes / target.read_bytes


def cost_hint(target: Weights, draft: Weights, num_forwards: int = USUAL_FORWARDS) -> str | None:
    """Return a line on a draft, not the target itself, of 16 bits whose step reads more than `DEAR`; else None."""
    share = draft_share(target, draft, num_forwards)
    if draft == target or draft.layer_bytes < WEIGHT_BYTES or share <= DEAR:
        return None
    less = draft_share(target, draft._replace(layer_bytes=1.0), num_forwards)
    return (
        f"a draft step of {num_forwards} forwards reads {100 * share:.0f} % of the bytes of its target's weights, with "
        f'"quantization": "{FP8}" for the draft {100 * less:.0f} % (modelled)'
    )


def stored_weights(config: Mapping[str, Any], quantization: str | None = None) -> Weights | None:
    """Return what a Hugging Face configuration, as JSON has it, says of a checkpoint; None where it cannot be told.

    `quantization` is what vLLM quantises as it loads, or calls the checkpoint's own.
    """
    try:
        decoder = Decoder.of(config)
        layer_bytes = _layer_bytes(quantization, config.get("quantization_config") or {})
        found = Weights(decoder.layer_params(decoder.active_experts), decoder.head_params)
    except (LookupError, ValueError, TypeError, AttributeError, ZeroDivisionError):
        return None
    return found._replace(layer_bytes=layer_bytes) if layer_bytes and min(found) > 0 else None


def _layer_bytes(quantization: str | None, stored: Mapping[str, Any]) -> float | None:
    """Return the bytes of a layer's weight; None of a method that is not known here."""
    method = str(stored.get("quant_method") or quantization or "")
    if not method:
        return WEIGHT_BYTES
    if "fp8" in method:
        return 1.0
    groups = stored.get("config_groups") or {}
    found = [group["weights"]["num_bits"] for group in groups.values() if (group.get("weights") or {}).get("num_bits")]
    bits = stored.get("bits") or stored.get("w_bit") or (found[0] if found else None)
    return None if bits is None else bits / 8
