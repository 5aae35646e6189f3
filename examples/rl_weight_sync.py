"""Reinforcement learning with an engine that samples: a training step, new weights for the engine, new samples.

    python -m examples.rl_weight_sync                                             # samples from our own served model
    python -m examples.rl_weight_sync --engine-python VLLM_ENV/bin/python    # samples from vLLM

A small byte-level Llama learns to write many different lowercase letters. It trains in FP8 with delayed scaling. In
each round the engine gets its weights, in the layout `FP8_DYNAMIC`, while it runs. Engine and training give the same
tokens different probabilities, for which importance weights correct. Each round prints how different: for the engine,
and for our own served model, read from exports with static scales (`FP8`) and with scales of each row (`FP8_DYNAMIC`).

vLLM runs in another process, under the Python that `--engine-python` names, so that PyTorch and JAX need not share an
environment: see `examples/vllm_engine.py`.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import save_file

from examples.byte_tokenizer import write_byte_tokenizer
from haliax_fp8 import TrainStep, calibrate, cast_params, fp8_linear_layers
from haliax_fp8.huggingface import export_model, load, serving_tensors
from haliax_fp8.models import Transformer, TransformerConfig
from haliax_fp8.serving import ImportanceWeights, TokenMismatch, importance_weights, log_probability_mismatch


CONFIG = TransformerConfig(layers=2, hidden=128, heads=2, kv_heads=1, head_dim=64, mlp=256, max_length=32, unroll=2)
PROMPT = list(b"The ")
SAMPLES, TOKENS = 64, 16
LEARNING_RATE = 3e-3


# --- Training ---------------------------------------------------------------------------------------------------------


def reward(tokens: np.ndarray) -> np.ndarray:
    """How many different lowercase letters each sample has, of all its tokens: `(samples, tokens) -> (samples,)`."""
    letters = np.arange(ord("a"), ord("z") + 1)
    return (tokens[:, :, None] == letters).any(axis=1).sum(axis=1) / tokens.shape[1]


@eqx.filter_jit
def log_probabilities(model: Transformer, tokens: jax.Array) -> jax.Array:
    """The log-probability of each sampled token, given the prompt and the tokens before it.

    Args:
        model: The model, in the dtype to compute in.
        tokens: `(samples, tokens)`.

    Returns:
        The same shape, in float32.
    """
    prompt = jnp.broadcast_to(jnp.asarray(PROMPT), (tokens.shape[0], len(PROMPT)))
    whole = jnp.concatenate([prompt, tokens], axis=1)
    logits = model(hax.named(whole, ("batch", "position"))).array[:, len(PROMPT) - 1 : -1]
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    return jnp.take_along_axis(log_p, tokens[..., None], axis=-1)[..., 0]


def loss_fn(model: Transformer, tokens: jax.Array, sampled: jax.Array, advantages: jax.Array) -> jax.Array:
    """The policy gradient's loss, with each token weighted by how much likelier training has it than the engine, up to
    twice.

    Args:
        model: The model, its weights in float32.
        tokens: `(samples, tokens)`.
        sampled: The engine's log-probabilities of them.
        advantages: `(samples,)`.
    """
    trained = log_probabilities(cast_params(model, jnp.bfloat16), tokens)
    return -jnp.mean(importance_weights(trained, sampled).weights * advantages[:, None] * trained)


# --- Engines ----------------------------------------------------------------------------------------------------------


class Engine(Protocol):
    """Something that samples, and takes weights while it runs."""

    def sync(self, model: Transformer) -> None:
        """Takes the weights of a model in training."""
        ...

    def sample(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and their log-probabilities, both `(samples, tokens)`."""
        ...


class OwnEngine:
    """Our own served model, in this process."""

    def sync(self, model: Transformer) -> None:
        """See `Engine`."""
        self.model = served(model, "FP8_DYNAMIC")

    def sample(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Engine`."""
        tokens, log_p = _sample(self.model, jax.random.key(seed))
        return np.asarray(tokens), np.asarray(log_p)


class Vllm:
    """vLLM, in another process.

    Args:
        process: What runs `examples/vllm_engine.py`.
        weights: The file through which weights go to it, best in memory.
    """

    def __init__(self, process: subprocess.Popen[str], weights: pathlib.Path):
        self.process, self.weights = process, weights

    def sync(self, model: Transformer) -> None:
        """See `Engine`."""
        save_file(dict(serving_tensors(model, "FP8_DYNAMIC")), self.weights)
        self._ask(weights=str(self.weights))

    def sample(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Engine`."""
        answer = self._ask(prompt=PROMPT, samples=SAMPLES, tokens=TOKENS, seed=seed)
        return np.array(answer["tokens"], np.int32), np.array(answer["log_p"], np.float32)

    def _ask(self, **request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(request), file=self.process.stdin, flush=True)
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"the engine ended with status {self.process.wait()}; its output says why")
        return json.loads(line)


@contextmanager
def engine_of(python: str | None, model: Transformer) -> Iterator[Engine]:
    """An engine, which starts with the weights of a model.

    Args:
        python: The Python that has vLLM; None for our own served model.
        model: The model.
    """
    if python is None:
        yield OwnEngine()
        return
    with folder_in_memory() as folder:
        export_model(model, f"{folder}/model", "FP8_DYNAMIC")
        write_byte_tokenizer(f"{folder}/model", max_length=CONFIG.max_length)
        command = [python, str(pathlib.Path(__file__).with_name("vllm_engine.py")), f"{folder}/model"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield Vllm(process, pathlib.Path(folder, "weights.safetensors"))
            finally:
                process.terminate()


def folder_in_memory() -> tempfile.TemporaryDirectory[str]:
    """A folder that takes no disk, where the system has such folders."""
    in_memory = pathlib.Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=in_memory if in_memory.is_dir() else None)


def served(model: Transformer, layout: str) -> Transformer:
    """The model as an engine has it: exported and read again, which rounds scales to bfloat16."""
    with folder_in_memory() as folder:
        export_model(model, f"{folder}/model", layout)
        return load(f"{folder}/model", weights="served")


@eqx.filter_jit
def _sample(model: Transformer, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws token by token; causality hides the positions that are not drawn yet."""
    window = jnp.zeros((SAMPLES, len(PROMPT) + TOKENS), jnp.int32).at[:, : len(PROMPT)].set(jnp.asarray(PROMPT))

    def draw(window: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        position, key = step
        logits = model(hax.named(window, ("batch", "position"))).array[:, position - 1].astype(jnp.float32)
        token = jax.random.categorical(key, logits)
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]
        return window.at[:, position].set(token.astype(jnp.int32)), (token, log_p)

    steps = (len(PROMPT) + jnp.arange(TOKENS), jax.random.split(key, TOKENS))
    _, (tokens, log_p) = jax.lax.scan(draw, window, steps)
    return tokens.T, log_p.T


# --- The loop ---------------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """One round of the loop.

    Args:
        reward: The mean over the samples.
        engine: The engine's samples weighted, and how far its log-probabilities are from those of training.
        static: The distance for our own served model, with static scales.
        dynamic: The same with scales of each row, as the engine has them.
    """

    reward: float
    engine: ImportanceWeights
    static: TokenMismatch
    dynamic: TokenMismatch

    def __str__(self) -> str:
        """A row of the table."""
        mismatches = (self.engine.mismatch, self.static, self.dynamic)
        errors = "".join(f"{float(each.multiplicative_error):17.4f}" for each in mismatches)
        return f"{self.reward:8.3f}{float(self.engine.effective_sample_size):8.4f}{errors}"


def main(argv: Sequence[str] | None = None) -> list[Round]:
    """Runs the command line; returns the rounds."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.rl_weight_sync", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=20, help="of sampling and training (default: %(default)s)")
    parser.add_argument("--engine-python", metavar="PATH", help="the Python that has vLLM (default: our served model)")
    options = parser.parse_args(argv)

    model = fp8_linear_layers(Transformer.init(CONFIG, key=jax.random.key(0)), exclude="head")
    noise = jax.random.randint(jax.random.key(1), (SAMPLES, TOKENS), 0, CONFIG.vocab)
    model = calibrate(model, loss_fn, [(noise, jnp.zeros((SAMPLES, TOKENS)), jnp.ones(SAMPLES))])
    step = TrainStep(loss_fn, optax.adam(LEARNING_RATE))
    opt_state, rounds = step.init(model), []
    with engine_of(options.engine_python, model) as engine:
        print(
            "The effective sample size; and the mean of exp |change of log p|: in the engine, and in our served model."
        )
        print(f"round  reward{'size':>8}{'engine':>17}{'our FP8':>17}{'our FP8_DYNAMIC':>17}")
        for index in range(options.rounds):
            engine.sync(model)
            # vLLM adds its number to the seed of each sample.
            tokens, sampled = engine.sample(seed=index * SAMPLES)
            models = (cast_params(model, jnp.bfloat16), served(model, "FP8"), served(model, "FP8_DYNAMIC"))
            trained, *quantized = (log_probabilities(each, jnp.asarray(tokens)) for each in models)
            mismatches = [log_probability_mismatch(trained, each) for each in quantized]
            rewards = reward(tokens)
            rounds.append(Round(float(rewards.mean()), importance_weights(trained, sampled), *mismatches))
            print(f"{index:5}{rounds[-1]}", flush=True)
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
            batch = (jnp.asarray(tokens), jnp.asarray(sampled), jnp.asarray(advantages, jnp.float32))
            model, opt_state, _ = step(model, opt_state, *batch)
    return rounds


if __name__ == "__main__":
    sys.exit(not main())
