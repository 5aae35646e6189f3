"""Text from a language model: a loop that computes the whole text again for each token. Caches are for engines."""

from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis
from jaxtyping import PRNGKeyArray

from haliax_fp8.models import Transformer


def generate(
    model: Transformer,
    prompt: jax.Array,
    *,
    count: int,
    temperature: float = 0.0,
    stop: Sequence[int] = (),
    key: PRNGKeyArray | None = None,
) -> np.ndarray:
    """Continues a prompt, token by token.

    Args:
        model: The model, in the dtype to compute in.
        prompt: Integers `(length,)`, at least one and at most `model.config.max_length`.
        count: How many tokens to add at most. If the text gets longer than the model reads, its oldest tokens drop out.
        temperature: Divides the logits; 0 picks the likeliest token.
        stop: Tokens that end the text, such as `eos_token_id` of the folder; the last token is one of them then.
        key: The random key for sampling; by default the same at each call.

    Returns:
        The added tokens.
    """
    key = jax.random.key(0) if key is None else key
    tokens, written = _loop(model, prompt, key, count, temperature, tuple(stop))
    return np.asarray(tokens)[: int(written)]


@eqx.filter_jit
def _loop(model, prompt, key, count, temperature, stop):
    # Causality hides the positions after the last token.
    Position = Axis("position", min(model.config.max_length, prompt.size + count))
    window = jnp.zeros(Position.size, jnp.int32).at[: prompt.size].set(prompt)

    def goes_on(state):
        _, _, tokens, written = state
        return (written < count) & ~jnp.isin(tokens[written - 1], jnp.array(stop, jnp.int32))

    def add_token(state):
        window, length, tokens, written = state
        logits = model(hax.named(window, Position)).array[length - 1].astype(jnp.float32)
        draw = lambda: jax.random.categorical(jax.random.fold_in(key, written), logits / temperature)
        token = draw() if temperature else jnp.argmax(logits)
        window = jnp.where(length == Position.size, jnp.roll(window, -1), window)
        length = jnp.minimum(length, Position.size - 1)
        return window.at[length].set(token.astype(jnp.int32)), length + 1, tokens.at[written].set(token), written + 1

    # No token is -1.
    state = window, jnp.int32(prompt.size), jnp.full(count, -1, jnp.int32), jnp.int32(0)
    return jax.lax.while_loop(goes_on, add_token, state)[2:]


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
