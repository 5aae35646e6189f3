"""Plugins for platforms that are started after JAX has started its own."""

from .private import needs


def complete_plugin(platform: str) -> None:
    """Tells a plugin how to divide custom calls over devices, as JAX tells the plugins that it finds at startup.

    Args:
        platform: Its name in JAX, such as `"cuda"`.
    """
    with needs("the preflight with NVIDIA's compiler"):
        from jax._src import xla_bridge

        c_api = xla_bridge._backend_factories[platform].c_api
        callbacks = xla_bridge._plugin_callbacks
    for callback in callbacks:
        callback(c_api=c_api)
