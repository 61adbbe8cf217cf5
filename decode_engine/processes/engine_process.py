"""The process of the engine: loads the model, and serves doors over the link."""

from __future__ import annotations

import logging
from concurrent.futures import Future

from decode_engine.errors import EngineCrashedError, ShuttingDownError
from decode_engine.orders.events import event_of_error
from decode_engine.processes.attached import Parent, Serving, Silent, run_attached
from decode_engine.processes.attached import Phase as PhaseWord
from decode_engine.processes.link.host import EngineHost
from decode_engine.rpc.transport.starting import Phase
from index_store.cli.traces import open_traces
from index_store.models.resolve import resolve_model

_STEP_S = 1.0  # for the step that is taken when it is told to end
_SPANS_S = 1.0

logger = logging.getLogger(__name__)


def serve_engine(parent: Parent) -> int:
    """Serves until told to stop, or until the engine crashes. Returns the exit code."""
    setup, phase = parent.setup, Phase()
    host = EngineHost(setup.link, lambda pid: parent.say(Silent(pid)))
    phase.listen(host.say, always=True)
    phase.listen(lambda text: parent.say(PhaseWord(text)), always=True)
    phase.say("import libraries")
    from decode_engine.core.loading import load_service
    from decode_engine.core.local import LocalCore

    compiling: list[Future[None]] = []
    store, folder = setup.config.open_store(), resolve_model(setup.config.model)
    traces = open_traces()
    service = load_service(
        setup.config, store, folder, phase, lambda error: parent.end(), compiling.append, traces
    )
    service.start()
    facts = host.open(LocalCore(service))
    parent.say(Serving(facts.identity.fingerprint))
    told = parent.wait() is not None
    for each in compiling:
        each.cancel()
    if told and service.engine.places:
        logger.warning("ending unfinished requests: %d", service.engine.places)
    service.close(_STEP_S)
    last = (
        ShuttingDownError("the server is shutting down") if told else EngineCrashedError("the engine failed")
    )
    host.close(event_of_error(last))
    if traces is not None:
        traces.close(_SPANS_S)
    return 0 if told else 1


def main() -> None:
    """Ends the process, whatever its threads do."""
    run_attached(serve_engine)
