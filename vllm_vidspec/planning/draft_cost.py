"""What a draft step reads beside its target's, and what is said where quantising the draft would help; plain Python."""

from collections.abc import Mapping
from typing import Any, NamedTuple

DEAR = 1 / 3  # a draft step that reads more than this of the target's bytes is worth a word
USUAL_FORWARDS = 5  # of a draft step, where nobody has said
FP8 = "fp8_per_tensor"
WEIGHT_BYTES = 2  # of a weight that is not quantised, as those of the output head
INT4_BYTES = 0.5 + 2.5 / 128  # of a weight of four bits, with a scale and a zero for each group of 128
# Released checkpoints of drafts in four bits that vLLM reads as they are, by what a config.json says of the model:
# its type, decoder layers and hidden size.
FOUR_BITS = {
    ("qwen2_5_vl", 36, 2048): "RedHatAI/Qwen2.5-VL-3B-Instruct-quantized.w4a16",
    ("qwen2_5_vl", 28, 3584): "RedHatAI/Qwen2.5-VL-7B-Instruct-quantized.w4a16",
    ("qwen3_vl", 36, 2560): "cyankiwi/Qwen3-VL-4B-Instruct-AWQ-4bit",
    ("qwen3_vl", 36, 4096): "cyankiwi/Qwen3-VL-8B-Instruct-AWQ-4bit",
}


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


def four_bit_checkpoint(config: Mapping[str, Any]) -> str | None:
    """Return a released checkpoint in four bits of the model that a configuration, as JSON has it, is of; or None."""
    try:
        decoder = Decoder.of(config)
    except (LookupError, ValueError, TypeError, AttributeError, ZeroDivisionError):
        return None
    return FOUR_BITS.get((str(config.get("model_type")), decoder.layers, decoder.hidden))


def cost_hint(
    target: Weights, draft: Weights, num_forwards: int = USUAL_FORWARDS, four_bits: str | None = None
) -> str | None:
    """Return a line on a draft, not the target itself, of more than four bits whose step reads more than `DEAR`; else
    None. `four_bits` is a checkpoint of it in four bits, where one is known.
    """
    share = draft_share(target, draft, num_forwards)
    if draft == target or draft.layer_bytes < 1 or share <= DEAR:
        return None

    def percent(layer_bytes: float) -> str:
        return f"{100 * draft_share(target, draft._replace(layer_bytes=layer_bytes), num_forwards):.0f} %"

    fp8 = f', with "quantization": "{FP8}" {percent(1.0)}' if draft.layer_bytes > 1 else ""
    return (
        f"a draft step of {num_forwards} forwards reads {100 * share:.0f} % of the bytes of its target's weights, of a "
        f"checkpoint in four bits {percent(INT4_BYTES)}{f' ({four_bits})' if four_bits else ''}{fp8} (modelled)"
    )


def stored_weights(config: Mapping[str, Any], quantization: str | None = None) -> Weights | None:
    """Return what a Hugging Face configuration, as JSON has it, says of a checkpoint; None where it cannot be told.

    `quantization` is what vLLM quantises as it loads, or calls the checkpoint's own.
    """
    try:
        decoder = Decoder.of(config)
        layer_bytes = bytes_of_layers(quantization, config.get("quantization_config") or {})
        found = Weights(decoder.layer_params(decoder.active_experts), decoder.head_params)
    except (LookupError, ValueError, TypeError, AttributeError, ZeroDivisionError):
        return None
    return found._replace(layer_bytes=layer_bytes) if layer_bytes and min(found) > 0 else None


def bytes_of_layers(quantization: str | None, stored: Mapping[str, Any]) -> float | None:
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
