"""The scheduler half: how much of a prompt the cache has, what the workers load and store, and when leases end.

    get_num_new_matched_tokens   asks the server once per attempt and gives the same answer until it is used
    update_state_after_alloc     the answer becomes a load, or its lease is given back at once
    build_connector_meta         the plan of this step: loads, and the chunks that will be complete after it
    update_connector_output      the load is over: its lease is given back
    request_finished             whatever is left is given back

Loads are asynchronous in vLLM's sense, unless the user wants them not to be: the request waits while the workers copy,
and is computed afterwards. That costs a step and buys a clean failure: no token is computed on blocks that did not
arrive, whatever runs at the same time (overlapping batches included).

A load is exactly the promised tokens [local, local + external): from the block behind the engine's own hit (vLLM
presents that hit in whole blocks) to the end of the cache's hit, at most to the last token but one. Where that end lies
inside a block, the rest of the block is computed; nothing below `local` and nothing behind the promise is ever written.

No hook waits for the server, except that all lookups of one step together may wait PATIENCE for their answers.
"""

import logging
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from lmcache_connector.config import ConnectorConfig
from lmcache_connector.events import EventFeed
from lmcache_connector.health import ServerLink, attacher
from lmcache_connector.identity import PromptIdentities, PromptIdentity, session_id
from lmcache_connector.metadata import LoadJob, QueryJob, StepOutcome, StepPlan, StoreJob
from lmcache_connector.opt_out import read_opt_out
from lmcache_connector.q_plan import over, query_job
from lmcache_connector.requests import Loading, Lookup, RequestState
from lmcache_connector.reset import ResetProgress
from lmcache_connector.stats import Recorder
from lmcache_connector.store_plan import block_tables, first_whole_chunk, step_chunks, store_job
from lmcache_connector.tracker import external_tokens
from lmcache_sdk.attachment import Attachment
from lmcache_sdk.errors import LMCacheSDKError
from lmcache_server.protocol.messages import Acquire, Acquired, Clear, End, Prompt, Release, SessionId

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

__all__ = ["PATIENCE", "SchedulerHalf"]

logger = logging.getLogger(f"vllm.{__name__}")

PATIENCE = 0.001
"""Seconds. Most answers take a tenth of it; a lookup that takes longer is asked for again in the next step."""

MISS = Acquired(0)


class SchedulerHalf:
    """Lives in the engine's scheduler; called from its thread only."""

    def __init__(self, config: ConnectorConfig) -> None:
        self._config = config
        self._identities = PromptIdentities(config.prompts)
        self._requests: dict[str, RequestState] = {}
        self._loading: dict[str, Loading] = {}
        self._loads: list[LoadJob] = []
        self._patience = PATIENCE
        self._reset = ResetProgress()
        self.stats = Recorder()
        self.feed = EventFeed() if config.publishes_events else None
        self.link = ServerLink(config.settings, attacher(config, "scheduler", None), self._leases, self.feed)
        self.link.start()

    # --- requests ------------------------------------------------------------------------------------------------

    def add_request(self, request: "Request") -> None:
        """A request has arrived."""
        state = RequestState(request, self._identities.arrived(request), read_opt_out(request))
        self.stats.add(bypassed_requests=state.identity is None)
        self._requests[request.request_id] = state

    def matched_tokens(self, request: "Request", local: int) -> tuple[int | None, bool]:
        """How many tokens behind the `local` ones can be loaded, and whether the load is asynchronous.

        None: not known yet, ask again.
        """
        state = self._requests.get(request.request_id)
        attachment = self.link.attachment
        if state is None:
            return 0, False
        state.outdated = False  # whoever is asked about has no KV yet
        self._clear_again()
        if attachment is None or self._reset.settling or not self._may_load(state):
            return 0, False
        self._use(state, attachment)
        if state.lookup is None:
            whole_chunks = request.num_tokens // attachment.hello.chunk_size * attachment.hello.chunk_size
            if external_tokens(whole_chunks, request.num_tokens, local) == 0:
                return 0, False
            state.lookup = self._ask(state, attachment)
        answer = self._answer(state.lookup)
        if answer is None:
            return None, False
        state.local = local
        tokens = external_tokens(answer.chunks * attachment.hello.chunk_size, request.num_tokens, local)
        return tokens, tokens > 0 and self._config.settings.load_async

    def allocated(self, request: "Request", blocks: "KVCacheBlocks", external: int) -> None:
        """The request has `blocks`, of which `external` tokens behind the local ones are to be loaded."""
        state = self._requests.get(request.request_id)
        if state is None or state.lookup is None:
            return
        lookup, state.lookup = state.lookup, None
        if lookup.answer is not None:
            state.store.found(lookup.answer.chunks)
        if external == 0 or lookup.answer is None:
            self._skip(state, lookup)
            return
        end = state.local + external
        tables = block_tables(self._config.shape, blocks.get_block_ids(), end)
        hello = lookup.attachment.hello
        self._loads.append(
            LoadJob(
                request.request_id,
                state.local,
                end,
                hello.chunk_size,
                tables,
                lookup.answer,
                lookup.attachment.instance,
                hello.incarnation,
            )
        )
        written = frozenset(tables[0][state.local // self._config.shape.groups[0].block_size :])
        self._loading[request.request_id] = Loading(lookup.attachment, lookup.answer.lease, written)

    def finished(self, request: "Request") -> None:
        """The request is over, or was aborted: nothing of it stays, except a load that is under way."""
        state = self._requests.pop(request.request_id, None)
        if state is None or state.attachment is None:
            return
        if state.lookup is not None:
            self._skip(state, state.lookup)
        sessions = tuple(session_id(request.request_id, attempt) for attempt in range(state.attempts))
        loading = self._loading.get(request.request_id)
        if loading is not None:
            loading.sessions = sessions
        else:
            self._end(state.attachment, sessions)

    # --- steps ---------------------------------------------------------------------------------------------------

    def plan(self, output: "SchedulerOutput") -> StepPlan:
        """What the workers do around the step `output`."""
        self._patience = PATIENCE
        loads, self._loads = self._loads, []
        # What is computed behind a load that this step itself does may turn out wrong, whoever computes it.
        trusted = self._config.settings.load_async or not loads
        stores = tuple(self._stores(output)) if trusted else ()
        if stores:
            self._reset.planned()
        plan = StepPlan(tuple(loads), stores, idle=not output.num_scheduled_tokens)
        if not self._config.query_blocks:
            return plan
        queries = tuple(self._queries(output)) if trusted else ()
        return replace(plan, queries=queries, over=over(output))

    def done(self, output: "KVConnectorOutput") -> None:
        """The workers' report on a step."""
        outcome = output.kv_connector_worker_meta
        assert outcome is None or isinstance(outcome, StepOutcome)
        loaded = outcome.loaded if outcome is not None else frozenset()
        if output.invalid_block_ids:  # of several ranks one may fail before the others are done
            for loading in self._loading.values():
                loading.missing |= loading.blocks & output.invalid_block_ids
        for request_id in (output.finished_recving or set()) | loaded:
            self._loaded(request_id, output)
        for request_id, stored in (outcome.stored if outcome is not None else {}).items():
            if (state := self._requests.get(request_id)) is not None:
                state.store.report(stored)
        if outcome is not None and outcome.stored:
            self._reset.reported()
            self._clear_again()

    def clear(self) -> bool:
        """Make the server forget every cached chunk; whether it did.

        From then on no request is promised, and none stores, KV that is older: answers to earlier lookups are given
        back, and a request that has computed or loaded something stores nothing until it is computed anew. Only a load
        that was promised before is carried out. What the engine keeps in its own cache is the engine's: where vLLM says
        that it could not reset that, later requests may store what they hit there.
        """
        attachment = self.link.attachment
        try:
            if attachment is None:
                raise LMCacheSDKError("there is no connection")
            attachment.connection.request(Clear())
        except LMCacheSDKError as error:
            logger.warning(
                "the cache server at %s was not reset (%s): when it is back, its chunks are used as before; reset it "
                "again then, or run `lmcache kvcache clear` there",
                self.link.url, error,
            )  # fmt: skip
            if attachment is not None:
                self.link.lost(attachment, error)
            return False
        self._reset.cleared()
        for state in self._requests.values():
            if state.lookup is not None:
                self._give_back(state.lookup)
                state.lookup = None
            state.store.forget()
            state.outdated = state.request.num_computed_tokens > 0
        return True

    def _clear_again(self) -> None:
        """Complete a reset: what was under way then has been stored by now."""
        attachment = self.link.attachment
        if self._reset.clear_again and attachment is not None:
            self._tell(attachment, Clear())
            self._reset.clear_again = False

    def close(self) -> None:
        """Leave the server; it releases what this half still holds."""
        self.link.close()

    # --- lookups -------------------------------------------------------------------------------------------------

    def _may_load(self, state: RequestState) -> bool:
        return (
            self._config.loads
            and state.identity is not None
            and not state.opt_out.no_load
            and not state.failed
            and not state.request.skip_reading_prefix_cache
        )

    def _identity(self, state: RequestState) -> PromptIdentity | None:
        """The request's identity, which it loses for good when it does not hold any more."""
        if state.identity is not None and not self._identities.still(state.request, state.identity):
            state.identity = None
        return state.identity

    def _use(self, state: RequestState, attachment: Attachment) -> None:
        """Forget what belongs to another attachment: a restarted server knows nothing of it."""
        if state.attachment is not attachment:
            state.attachment = attachment
            state.lookup = None
            state.attempts = 0
            state.store.forget()

    def _ask(self, state: RequestState, attachment: Attachment) -> Lookup | None:
        request, identity = state.request, self._identity(state)
        if identity is None:
            return None
        session = session_id(request.request_id, state.attempts)
        tokens = state.packed.first(request.num_tokens, request.all_token_ids)
        prompt = Prompt(session, tokens, identity.salt, identity.extras(attachment.hello.chunk_size))
        try:
            pending = attachment.connection.submit(Acquire(attachment.instance, (prompt,)))
        except LMCacheSDKError as error:
            self.link.lost(attachment, error)
            return None
        state.attempts += 1
        return Lookup(attachment, session, pending, request.num_tokens, time.monotonic())

    def _answer(self, lookup: Lookup | None) -> Acquired | None:
        """The server's answer; a miss if there will be none; None if it is not there yet."""
        if lookup is None:
            return MISS
        if lookup.answer is None:
            started = time.monotonic()
            try:
                reply = lookup.pending.poll(max(0.0, self._patience))
            except LMCacheSDKError as error:
                self.link.lost(lookup.attachment, error)
                lookup.answer = MISS
            else:
                if reply is not None:
                    lookup.answer = self._counted(lookup, reply.results[0])
            self._patience -= time.monotonic() - started
        return lookup.answer

    def _counted(self, lookup: Lookup, answer: Acquired) -> Acquired:
        self.stats.add(
            {"lookup_seconds": time.monotonic() - lookup.asked},
            asked_tokens=lookup.tokens,
            hit_tokens=answer.chunks * lookup.attachment.hello.chunk_size,
        )
        return answer

    # --- leases --------------------------------------------------------------------------------------------------

    def _leases(self) -> list[int]:
        """Leases in use; asked for by the heartbeat's thread."""
        loading = [loading.lease for loading in list(self._loading.values())]
        waiting = [state.lookup for state in list(self._requests.values())]
        return loading + [lookup.answer.lease for lookup in waiting if lookup and lookup.answer and lookup.answer.lease]

    def _skip(self, state: RequestState, lookup: Lookup) -> None:
        """The answer is not used."""
        if lookup.answer is not None:
            hit = lookup.answer.chunks * lookup.attachment.hello.chunk_size
            self.stats.add(skipped_loads=external_tokens(hit, lookup.tokens, state.local) > 0)
        self._give_back(lookup)

    def _give_back(self, lookup: Lookup) -> None:
        """End the lease of an answer that is not used; one whose handle is not here yet ends with its session."""
        if lookup.answer is None:
            self._end(lookup.attachment, (lookup.session,))
        else:
            self._release(lookup.attachment, lookup.answer.lease)

    def _loaded(self, request_id: str, output: "KVConnectorOutput") -> None:
        loading = self._loading.pop(request_id, None)
        if loading is None:
            return
        self._release(loading.attachment, loading.lease)
        self._end(loading.attachment, loading.sessions)
        state = self._requests.get(request_id)
        failed = request_id in output.failed_recving or bool(loading.missing)
        aborted = state is None and not failed and self._config.settings.load_async
        self.stats.add(failed_loads=failed, failed_blocks=len(loading.missing), aborted_loads=aborted)
        if state is not None and failed:
            state.failed = True
            state.store.forget()

    def _release(self, attachment: Attachment, lease: int) -> None:
        if lease:
            self._tell(attachment, Release(attachment.instance, (lease,)))

    def _end(self, attachment: Attachment, sessions: tuple[SessionId, ...]) -> None:
        if sessions:
            self._tell(attachment, End(attachment.instance, sessions))

    def _tell(self, attachment: Attachment, message: Release | End | Clear) -> None:
        """Send something that needs no answer; to a server that is away, nothing."""
        if attachment is not self.link.attachment:
            return
        try:
            attachment.connection.submit(message)
        except LMCacheSDKError as error:
            self.link.lost(attachment, error)

    # --- stores --------------------------------------------------------------------------------------------------

    def _stores(self, output: "SchedulerOutput") -> Iterable[StoreJob]:
        attachment = self.link.attachment
        block_state = output.kv_connector_block_state
        if attachment is None or block_state is None or not self._config.stores:
            return
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None or state.identity is None or state.opt_out.no_store or state.outdated:
                continue
            self._use(state, attachment)
            chunk_size, shape = attachment.hello.chunk_size, self._config.shape
            chunks = step_chunks(state, scheduled, chunk_size, self._config.settings.save_decode_cache)
            if chunks <= state.store.stored:
                continue
            tables = block_tables(shape, block_state.get_block_ids(request_id) or (), chunks * chunk_size)
            first = first_whole_chunk(shape, tables, chunk_size)
            if chunks > first and state.store.ask(chunks) and (identity := self._identity(state)) is not None:
                yield store_job(state, identity, chunks, chunk_size, tables, first)

    # --- queries -------------------------------------------------------------------------------------------------

    def _queries(self, output: "SchedulerOutput") -> Iterable[QueryJob]:
        attachment = self.link.attachment
        block_state = output.kv_connector_block_state
        if attachment is None or block_state is None:
            return
        group = self._config.shape.lasting_group
        chunk_size = attachment.hello.chunk_size
        for request_id, scheduled in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            tables = block_state.get_block_ids(request_id)
            if state is None or tables is None or state.identity is None or state.opt_out.no_store or state.outdated:
                continue
            job = query_job(
                state.request,
                scheduled,
                state.identity,
                state.packed,
                tables[group.table],
                chunk_size,
                group.block_size,
            )
            if job is not None and self._identity(state) is not None:
                yield job
