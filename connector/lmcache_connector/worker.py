"""The worker half: what one rank does around the forward pass; loads and stores are done by their own parts.

    start_load_kv     loads of this step begin (see loading)
    wait_for_save     stores of this step: reserve, copy, commit (see storing); then the blocks may be reused
    get_finished      the loads that are over, good or bad

A server that does not answer costs its deadline once; then the link is down and the hooks do nothing until it is back.
"""

import logging
from collections.abc import Sequence

import torch

from lmcache_connector.config import ConnectorConfig
from lmcache_connector.gpu_connector import Copier
from lmcache_connector.health import ServerLink, attacher
from lmcache_connector.loading import Finished, Loader
from lmcache_connector.metadata import StepOutcome, StepPlan
from lmcache_connector.page_lock import PageLock
from lmcache_connector.stats import Recorder
from lmcache_connector.storing import Storer
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.transport import ServerConnection

__all__ = ["WorkerHalf"]

logger = logging.getLogger(f"vllm.{__name__}")


class WorkerHalf:
    """Lives in a worker of the engine; called from its thread only."""

    def __init__(self, config: ConnectorConfig, rank: int, copiers: Sequence[Copier], device: torch.device) -> None:
        """`copiers` are those of the layout's groups, in order, for pages on `device`."""
        self._asynchronous = config.settings.load_async
        self._copiers = copiers
        self._page_lock = PageLock(device)
        shard, replica = divmod(rank, config.shape.replicas)
        self._stores = replica == 0
        self.stats = Recorder(first=rank == 0)
        self._plan = StepPlan()
        self._stored: dict[str, int] = {}
        self._register = attacher(config, "worker", shard)
        self.link = ServerLink(config.settings, self._attach)
        self.loader = Loader(config, self.link, copiers, shard, self.stats)
        self.storer = Storer(config, self.link, copiers, self.stats)
        self.link.start()

    def _attach(self, connection: ServerConnection) -> Attachment:
        attachment = self._register(connection)
        memory = attachment.transfer.memory
        if memory is not None:
            self._page_lock.lock(memory)
        return attachment

    def close(self) -> None:
        """Finish what is under way and leave the server."""
        self.loader.close()
        self.link.close()

    def load(self, plan: StepPlan) -> None:
        """Begin the loads of the plan."""
        self._plan = plan
        self.loader.start(plan.loads, idle=plan.idle)

    def store(self, plan: StepPlan) -> None:
        """Do the stores of the plan."""
        self._plan = plan
        if self._stores and plan.stores:
            self._stored = self.storer.store(plan.stores)

    def take_finished(self) -> Finished:
        """The loads that are over since the last call."""
        return self.loader.finished(idle=self._plan.idle)

    def take_outcome(self) -> StepOutcome | None:
        """The outcome of this step, if there is something to say."""
        stored, self._stored = self._stored, {}
        loaded = frozenset() if self._asynchronous else frozenset(job.request_id for job in self._plan.loads)
        return StepOutcome(stored, loaded) if stored or loaded else None
