"""CLIP's text encoder, with and without the projection of its pooled output.

Source: Radford et al. 2021; module names and config fields follow transformers' CLIPTextModel and
CLIPTextModelWithProjection. Axes: B batch, T tokens, C channels, L layers, P channels of the projection.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from model_handlers.attention import Stack, attention
from model_handlers.config import Config
from model_handlers.stable_diffusion import original
from model_handlers.tensors import Tensor

ACTIVATIONS = {
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),  # the erf form is the reference's
}


@dataclass(frozen=True)
class TextConfig(Config):
    """The fields of a CLIP text encoder's config.json that its output depends on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    max_position_embeddings: int = 77
    hidden_act: str = "quick_gelu"
    layer_norm_eps: float = 1e-5
    projection_dim: int = 512
    # 2 is what configs said before transformers 4.31 corrected them; it stands for "the highest token id".
    eos_token_id: int = 49407

    LEGACY_EOS_TOKEN_ID = 2
    FIXED = {"use_attention_mask": False}  # noqa: RUF012

    def check(self) -> None:
        self.require("hidden_act", self.hidden_act in ACTIVATIONS, f"one of {', '.join(ACTIVATIONS)}")
        self.require(
            "num_attention_heads", self.hidden_size % self.num_attention_heads == 0, "a divisor of hidden_size"
        )


class Embeddings(nnx.Module):
    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs, **dtypes):
        self.token_embedding = nnx.Embed(config.vocab_size, config.hidden_size, rngs=rngs, **dtypes)
        self.position_embedding = nnx.Embed(config.max_position_embeddings, config.hidden_size, rngs=rngs, **dtypes)

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.token_embedding(ids) + self.position_embedding(jnp.arange(ids.shape[1]))


class SelfAttention(nnx.Module):
    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs, **dtypes):
        width = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.q_proj = nnx.Linear(width, width, rngs=rngs, **dtypes)
        self.k_proj = nnx.Linear(width, width, rngs=rngs, **dtypes)
        self.v_proj = nnx.Linear(width, width, rngs=rngs, **dtypes)
        self.out_proj = nnx.Linear(width, width, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        # The mask is causal only: the reference attends to padding too, so padding is part of the result.
        mixed = attention(self.q_proj(x), self.k_proj(x), self.v_proj(x), self.num_heads, causal=True)
        return self.out_proj(mixed)


class MLP(nnx.Module):
    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs, **dtypes):
        self.activation = ACTIVATIONS[config.hidden_act]
        self.fc1 = nnx.Linear(config.hidden_size, config.intermediate_size, rngs=rngs, **dtypes)
        self.fc2 = nnx.Linear(config.intermediate_size, config.hidden_size, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.fc2(self.activation(self.fc1(x)))


class EncoderLayer(nnx.Module):
    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs, **dtypes):
        norm = {"epsilon": config.layer_norm_eps, "use_fast_variance": False, "rngs": rngs, **dtypes}
        self.layer_norm1 = nnx.LayerNorm(config.hidden_size, **norm)
        self.self_attn = SelfAttention(config, rngs=rngs, **dtypes)
        self.layer_norm2 = nnx.LayerNorm(config.hidden_size, **norm)
        self.mlp = MLP(config, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Encoder(nnx.Module):
    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs, **dtypes):
        self.layers = Stack(config.num_hidden_layers, lambda rngs: EncoderLayer(config, rngs=rngs, **dtypes), rngs)


class TextTransformer(nnx.Module):
    def __init__(self, config: TextConfig, *, rngs: nnx.Rngs, **dtypes):
        self.embeddings = Embeddings(config, rngs=rngs, **dtypes)
        self.encoder = Encoder(config, rngs=rngs, **dtypes)
        self.final_layer_norm = nnx.LayerNorm(
            config.hidden_size, epsilon=config.layer_norm_eps, use_fast_variance=False, rngs=rngs, **dtypes
        )


class CLIPTextModel(nnx.Module):
    """Token ids to hidden states and a pooled embedding, the latter projected if `projection`."""

    RENAMES = (
        # transformers before 4.31 saved the constant 0, 1, 2 ... with the weights.
        (r"^text_model\.embeddings\.position_ids$", None),
        # transformers 5 saves a CLIPTextModel without the name of its only child.
        (r"^(?=(embeddings|encoder|final_layer_norm)\.)", "text_model."),
    )

    def __init__(self, config: TextConfig, *, projection: bool, rngs: nnx.Rngs, **dtypes):
        self.config = config
        self.text_model = TextTransformer(config, rngs=rngs, **dtypes)
        self.text_projection = (
            nnx.Linear(config.hidden_size, config.projection_dim, use_bias=False, rngs=rngs, **dtypes)
            if projection
            else None
        )

    def __call__(self, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Token ids (B, T) to all hidden states (L + 1, B, T, C), embeddings first, and the pooled (B, C or P).

        The hidden states come before the final norm, as transformers' `hidden_states`; the pooled
        output is the normed last state at the end-of-text token.
        """
        embedded = self.text_model.embeddings(ids)
        last, layers = self.text_model.encoder.layers.scan(lambda layer, x, _: (y := layer(x), y), embedded)
        normed = self.text_model.final_layer_norm(last)
        # Unlike an index by row numbers, this gather needs nothing of other rows, so no chip asks another for them.
        pooled = jnp.take_along_axis(normed, self._end_of_text(ids)[:, None, None], axis=1)[:, 0]
        if self.text_projection is not None:
            pooled = self.text_projection(pooled)
        return jnp.concatenate([embedded[None], layers]), pooled

    def from_original(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those of a single file that are this network's, by diffusers' names; see `original`."""
        return original.text_encoder(tensors, self.config.num_hidden_layers, self.text_projection is not None)

    def _end_of_text(self, ids: jax.Array) -> jax.Array:
        if self.config.eos_token_id == TextConfig.LEGACY_EOS_TOKEN_ID:
            return jnp.argmax(ids, axis=-1)
        # The first one: encoder 1 pads with the same token.
        return jnp.argmax(ids == self.config.eos_token_id, axis=-1)
