"""A plugin for a platform that was started after JAX had started its own."""

from jax._src import xla_bridge


def complete_plugin(platform: str) -> None:
    """Tells a plugin what JAX tells those that it finds at its start: how to divide custom calls over devices.

    Args:
        platform: Its name in JAX, such as `"cuda"`.
    """
    c_api = xla_bridge._backend_factories[platform].c_api
    for callback in xla_bridge._plugin_callbacks:
        callback(c_api=c_api)
