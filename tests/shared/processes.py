"""A run of several processes, as a script: one process of it, or the same run in one process alone.

    python tests/shared/processes.py PROCESS COUNT PORT FOLDER

trains a converted model on 4 devices in all. Of two processes, the last one dies after the last step. One process alone
trains the same, and then goes on from the checkpoint of the two with its devices in another order.
"""

import json
import os
import pathlib
import signal
import sys


STEPS, SAVED = 10, 5


def main(process: int, count: int, port: int, folder: pathlib.Path) -> None:
    """One process."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={4 // count}"
    import jax

    if count > 1:
        jax.distributed.initialize(
            f"127.0.0.1:{port}", count, process, heartbeat_timeout_seconds=10, shutdown_timeout_seconds=10
        )
    import equinox as eqx
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    from haliax_fp8 import DelayedScaling, TrainStep, fp8_linear_layers
    from haliax_fp8.checkpoints import load_into

    def loss_fn(model, x):
        return ((jax.vmap(model)(x) - x) ** 2).mean()

    data = np.random.default_rng(0).normal(size=(STEPS, 16, 32)).astype(np.float32)
    step = TrainStep(loss_fn, optax.sgd(0.1, momentum=0.9))

    def start(mesh, spec):
        """The model and the optimizer's state, divided; and a batch on the devices."""

        def on(x, spec):
            sharding = NamedSharding(mesh, spec)
            return jax.make_array_from_callback(x.shape, sharding, lambda index: np.asarray(x)[index])

        model = fp8_linear_layers(
            eqx.nn.MLP(32, 32, 64, 1, key=jax.random.key(0)), recipe=DelayedScaling(amax_history_length=4)
        )
        divided = lambda x: on(x, spec if x.ndim == 2 and x.shape[0] > 3 else P()) if eqx.is_array(x) else x
        return jax.tree.map(divided, (model, step.init(model))), lambda i: on(data[i], P(mesh.axis_names[0]))

    def train(state, batch, steps, saved=None):
        losses = []
        for i in steps:
            *state, metrics = step(*state, batch(i))
            losses.append(float(metrics["loss"]))
            if saved is not None and i + 1 == SAVED:
                with ocp.StandardCheckpointer() as checkpointer:
                    checkpointer.save(saved, eqx.filter(tuple(state), eqx.is_array))
        return losses

    state, batch = start(Mesh(np.array(jax.devices()), ("data",)), P("data"))
    result = {"losses": train(state, batch, range(STEPS), folder / "saved" if count > 1 else None)}
    if count == 1:
        mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
        state, batch = start(mesh, P("model", "data"))
        state, report = load_into(state, folder / "saved", strict=True)
        result["resumed"] = train(state, batch, range(SAVED, STEPS))
    (folder / f"{count}_{process}.json").write_text(json.dumps(result))
    if count > 1 and process == count - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if count > 1:
        train(state, batch, range(STEPS))


if __name__ == "__main__":
    process, count, port = map(int, sys.argv[1:4])
    main(process, count, port, pathlib.Path(sys.argv[4]))
