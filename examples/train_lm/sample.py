"""A sample of text from a trained model."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis
from jaxtyping import PRNGKeyArray

from haliax_fp8.models import Transformer


@eqx.filter_jit
def generate(model: Transformer, prompt: jax.Array, *, count: int, temperature: float, key: PRNGKeyArray) -> jax.Array:
    """Continues a prompt, token by token, inside one compiled loop.

    The window has a fixed size. Until it is full, causality hides the positions after the last token; then its oldest
    token drops out.

    Args:
        model: The model, in the dtype to compute in.
        prompt: Integers `(length,)`, at least one and at most `model.config.max_length`.
        count: How many tokens to add.
        temperature: Divides the logits; 0 picks the likeliest token.
        key: The random key for sampling.

    Returns:
        Integers `(count,)`.
    """
    Position = Axis("position", model.config.max_length)
    window = jnp.zeros(Position.size, jnp.int32).at[: prompt.size].set(prompt)

    def next_token(carry: tuple[jax.Array, jax.Array], key: PRNGKeyArray):
        window, length = carry
        logits = model(hax.named(window, Position)).array[length - 1].astype(jnp.float32)
        token = jax.random.categorical(key, logits / temperature) if temperature else jnp.argmax(logits)
        window = jnp.where(length == Position.size, jnp.roll(window, -1), window)
        length = jnp.minimum(length, Position.size - 1)
        window = window.at[length].set(token.astype(jnp.int32))
        return (window, length + 1), token

    start = (window, jnp.asarray(prompt.size, jnp.int32))
    return jax.lax.scan(next_token, start, jax.random.split(key, count))[1]


def printable(text: bytes) -> str:
    """Bytes as text for a terminal, which control characters among them would command.

    Args:
        text: Bytes of a model, which may be anything.

    Returns:
        The text, with U+FFFD in place of bytes that are not UTF-8 and of control characters other than line feeds and
        tabs.
    """
    shown = lambda character: (
        character if character.isprintable() or character in "\n\t" else "\N{REPLACEMENT CHARACTER}"
    )
    return "".join(map(shown, text.decode(errors="replace")))
