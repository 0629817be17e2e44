"""The entry point of `vllm.general_plugins`: it makes `"kv_connector": "LMCacheMPConnector"` mean ours.

vLLM calls `register` in its front end, its engine core and every worker, before any connector is created; its own
registry has a connector of that name for another server, whose place ours takes. Nothing is imported until it is used.
"""

__all__ = ["NAME", "register"]

NAME = "LMCacheMPConnector"


def register() -> None:
    """Put our connector into vLLM's registry. Idempotent."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory._registry.pop(NAME, None)
    KVConnectorFactory.register_connector(NAME, "lmcache_connector.mp_connector", NAME)
